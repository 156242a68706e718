"""The suite as it is run: 220 lists against live SGLang and transformers, 70 of them in a catalog."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashrec.request import ScoreSpace
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.parity import ground, plan
from flashrec_harness.parity.cases import catalog_cases
from flashrec_harness.parity.ground import CATALOG, Ground, context_ground
from flashrec_harness.parity.plan import FULL, QUICK, Group, Reference, Sizes
from flashrec_harness.parity.suite import run
from flashrec_harness.references.types import Tokens


@pytest.fixture(scope="module")
def checks(model_context: SuiteContext) -> list[Check]:
    return run(model_context)


@pytest.fixture(scope="module")
def model_context(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> SuiteContext:
    from flashrec_harness.targets import resolve_catalog, resolve_model

    model_path = resolve_model(pytestconfig.getoption("--model-path"))
    return SuiteContext(
        model_path=model_path,
        sid_vocab_file=resolve_catalog(model_path, pytestconfig.getoption("--sid-vocab-file")),
        sid=pytestconfig.getoption("--sid"),
        seed=int(pytestconfig.getoption("--harness-seed")),
        out_dir=tmp_path_factory.mktemp("parity"),
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_list_equals_its_references(checks: list[Check], strict_harness: bool) -> None:
    red = [check for check in checks if check.outcome not in (Outcome.PASS, Outcome.NOT_RUN)]
    assert not red, "\n".join(f"{check.name}: {check.outcome}: {check.reason}" for check in red)
    absent = [check for check in checks if check.outcome is Outcome.NOT_RUN]
    if absent and strict_harness:
        pytest.fail(f"{absent[0].name}: not run: {absent[0].reason}")
    if absent:
        pytest.skip(f"{len(absent)} of {len(checks)} checks not run: {absent[0].reason}")


@pytest.mark.parametrize("reference", [Reference.SGLANG, Reference.TRANSFORMERS])
def test_two_hundred_lists_were_compared_with_each(checks: list[Check], reference: Reference) -> None:
    compared = {
        check.name: check.data["lists"]
        for check in checks
        if check.name.startswith(reference) and check.outcome is not Outcome.NOT_RUN
    }
    if not compared:
        pytest.skip(f"{reference} is not here")
    free = compared[f"{reference}, vocab, no catalog"]
    within = compared[f"{reference}, children, catalog"]
    assert free + within >= 200
    assert within >= 60


def test_every_score_space_was_held_against_the_oracle(checks: list[Check]) -> None:
    for space in ScoreSpace:
        names = {check.name for check in checks if check.name.startswith(f"{Reference.ORACLE}, {space}, ")}
        wanted = {"catalog, filters, end token", "edge catalogs"}
        assert {f"{Reference.ORACLE}, {space}, {title}" for title in wanted} <= names


def likely(prompt: Tokens, length: int) -> Tokens:
    return tuple(range(length))


@pytest.mark.parametrize("sizes", [FULL, QUICK])
def test_the_agenda_covers_what_it_must(model_context: SuiteContext, sizes: Sizes) -> None:
    groups = plan.checkpoint_groups(context_ground(model_context), sizes, 0, likely)
    for reference in (Reference.SGLANG, Reference.TRANSFORMERS):
        cases = [case for group in groups if reference in group.references for case in group.cases]
        free = [case for case in cases if case.catalog is None]
        assert {1, 64} <= {case.n for case in cases}
        assert {case.max_tokens for case in free} == {1, 2, 3, 4, 5, 6}
        assert sum(bool(case.stop_token_ids) for case in free) >= len(free) // 3
        assert any(case.n < case.beam_width for case in free)
    oracle = [case for group in groups if Reference.ORACLE in group.references for case in group.cases]
    assert any(case.exclude for case in oracle)
    assert any(case.allow is not None for case in oracle)
    assert any(case.score_end for case in oracle)
    assert {case.length_penalty for case in oracle} >= {0.0, 0.5, 1.0, 2.0}
    assert {case.implicit_begin for case in oracle} == {True, False}


def test_two_cases_with_one_answer_are_asked_once(edge: Ground) -> None:
    (first, *_) = next(group for group in plan.edge_groups(edge, QUICK, 0) if group.title == "edge catalogs").cases
    twin = replace(first, name="twin", implicit_begin=not first.implicit_begin, semantics="sglang")
    other = replace(first, name="other", n=first.n + 1, beam_width=first.beam_width + 1)
    assert plan.unique([first, twin, other]) == [first, other]
    group = Group("two", first.space, (first, other), (Reference.ORACLE,))
    assert plan.cases_for([group], Reference.SGLANG) == []
    assert plan.cases_for([group, group]) == [first, other]


def test_the_edge_catalogs_have_the_shapes_they_are_named_for(edge: Ground) -> None:
    catalogs = edge.catalogs
    assert CATALOG not in catalogs
    assert {len(catalog.vocabulary.codebooks) for catalog in catalogs.values()} == {1, 2, 3, 4, 5}
    chains = catalogs["single-child chains"].grammar()
    items = [chains.vocabulary.token_ids(sid) for sid in chains.legal]
    assert all(len(chains.children(tokens[:level])) == 1 for tokens in items for level in (1, 2, 3))
    assert len(catalogs["fewer than n"].sids) == 5
    assert len(catalogs["a single item"].sids) == 1


def test_a_catalog_too_large_for_the_references_is_left_out_and_said_to_be(
    model_context: SuiteContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ground, "_LARGEST_CATALOG", 10)
    without = context_ground(model_context)
    assert without.catalogs == {}
    assert "up to 10" in without.left_out
    groups = plan.checkpoint_groups(without, QUICK, 0, likely)
    assert {case.catalog for group in groups for case in group.cases} == {None}


def test_filters_are_no_longer_than_a_client_would_send(edge: Ground) -> None:
    known = edge.catalogs["3 levels"]
    huge = replace(edge, catalogs={"huge": replace(known, sids=known.sids * 100)})
    for case in catalog_cases(huge, ScoreSpace.SID, 6, 0, catalog="huge", filtered=True):
        assert len(case.exclude) <= 2000
        assert case.allow is None or len(case.allow) <= 2000
