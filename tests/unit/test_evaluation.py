"""``eval``: figures against a count by hand, against ``transformers``, and verdicts on known differences."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flashrec import Engine, EngineConfig, Request
from flashrec.errors import CatalogError, ConfigError
from flashrec.request import ScoreSpace
from flashrec_harness.checkpoints.fp8 import quantized_copy
from flashrec_harness.evaluation import gate, suite
from flashrec_harness.evaluation.engines import EngineSpec, parse_engine
from flashrec_harness.evaluation.figures import Answers, codes_of, figures
from flashrec_harness.evaluation.suite import EvalSettings, Judged, compared
from flashrec_harness.evaluation.testset import TestSet, load_test_set
from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.references.types import Tokens
from flashrec_harness.servers import flashrec_server

USERS, WIDTH = 12, 5
OURS = parse_engine("flashrec")


def settings(**fields: object) -> EvalSettings:
    return replace(EvalSettings(engine=OURS, n=WIDTH, sample=USERS), **fields)  # type: ignore[arg-type]


@pytest.fixture
def test_set(suite_context: SuiteContext) -> TestSet:
    return load_test_set(suite_context, USERS)


def test_figures_equal_a_count_by_hand(suite_context: SuiteContext, test_set: TestSet) -> None:
    (found,) = suite.judged(OURS, suite_context, test_set, settings(trie=(True,)))
    engine = Engine(
        EngineConfig(
            model_path=suite_context.model_path, sid_vocab_file=suite_context.sid_vocab_file, max_beam_width=WIDTH
        )
    )
    hits, gain, item_hits = 0, 0.0, 0
    for prompt, (target,) in zip(test_set.prompts, test_set.items, strict=True):
        (result,) = engine.generate([Request(input_ids=prompt, n=WIDTH)])
        places = [place for place, beam in enumerate(result.beams) if target in beam.items]
        hits += bool(places)
        gain += 1 / math.log2(places[0] + 2) if places else 0
        item_hits += target in [item for beam in result.beams for item in beam.items][:WIDTH]
    engine.close()
    assert len(test_set) == USERS
    assert found.figures.mean("HR@5") == found.figures.mean("recall@5") == pytest.approx(hits / USERS)
    assert found.figures.mean("NDCG@5") == pytest.approx(gain / USERS)
    assert found.figures.per_item["HR@5"].sum() == item_hits
    assert "HR@10" not in found.figures.per_sid
    assert (found.figures.invalid_rate, found.figures.duplicate_rate, found.figures.beams) == (0, 0, USERS * WIDTH)


def test_without_a_catalog_or_targets_it_is_a_usage_error(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="--sid-vocab-file"):
        load_test_set(SuiteContext(model_path=model_path))
    rows = tmp_path / "histories.csv"
    rows.write_text("user_id,history_item_ids,target_item_id\nu,P0001,\n")
    context = SuiteContext(model_path=model_path, sid_vocab_file=model_path / "catalog.json", sequences=rows)
    with pytest.raises(CatalogError, match="no row has a target_item_id"):
        load_test_set(context)


def test_rows_may_name_semantic_ids_and_several_targets(suite_context: SuiteContext, tmp_path: Path) -> None:
    catalog = load_test_set(suite_context, 1).catalog
    sid = "".join(f"<s_{'abc'[level]}_{code}>" for level, code in enumerate(catalog.sids[5].tolist()))
    first, other = catalog.items_of(5)[0], catalog.items_of(9)[0]
    rows = tmp_path / "rows.tsv"
    rows.write_text(f"user_id\thistory_item_ids\ttarget_item_id\nu\t{first} {sid}\t{sid} {other}\n")
    test = load_test_set(replace(suite_context, sequences=rows))
    assert test.sids == [(5, 9)]
    assert test.items == [(first, other)]
    by_item = tmp_path / "items.tsv"
    by_item.write_text(f"user_id\thistory_item_ids\ttarget_item_id\nu\t{first} {first}\t{first}\n")
    assert load_test_set(replace(suite_context, sequences=by_item)).prompts == test.prompts


def test_the_sample_is_drawn_by_the_seed(suite_context: SuiteContext) -> None:
    one, again = load_test_set(suite_context, 20), load_test_set(suite_context, 20)
    other = load_test_set(replace(suite_context, seed=1), 20)
    assert one.prompts == again.prompts != other.prompts
    assert "20 of 1,000 rows of test.csv, drawn by seed 0" in one.said


def tokens_of(test: TestSet, rank: int, *, end: bool = True) -> Tokens:
    tokens = tuple(
        int(book[code]) for book, code in zip(test.layout.codebooks, test.catalog.sids[rank].tolist(), strict=True)
    )
    assert test.layout.end is not None
    return (*tokens, test.layout.end) if end else tokens


def test_beams_that_are_no_item_keep_their_place_and_repeated_ones_count(test_set: TestSet) -> None:
    target = test_set.sids[0][0]
    legal = [rank for rank in range(6) if rank != target]
    invalid = (1, 2, 3)
    row = [
        tokens_of(test_set, legal[0]),
        invalid,
        tokens_of(test_set, legal[0], end=False),
        tokens_of(test_set, target),
    ]
    rest = [[tokens_of(test_set, rank) for rank in legal[:4]]] * (USERS - 1)
    found = figures(Answers("x", False, [row, *rest], 0.0), test_set, 5)
    assert (found.per_sid["HR@3"][0], found.per_sid["HR@5"][0]) == (0, 1)
    assert found.per_sid["NDCG@5"][0] == pytest.approx(1 / math.log2(3 + 2))
    before = (
        len(test_set.catalog.items_of(legal[0])) + 1 + test_set.catalog.items_of(target).index(test_set.items[0][0])
    )
    assert found.per_item["NDCG@5"][0] == pytest.approx(1 / math.log2(before + 2) if before < 5 else 0)
    assert found.invalid_rate == pytest.approx(1 / (4 * USERS))
    assert found.duplicate_rate == pytest.approx(1 / (4 * USERS))


def test_items_of_a_shared_sid_come_in_the_order_of_the_file(suite_context: SuiteContext, test_set: TestSet) -> None:
    assert suite_context.sid_vocab_file is not None
    listed = json.loads(suite_context.sid_vocab_file.read_text())
    key, items = next((key, items) for key, items in listed.items() if isinstance(items, list) and len(items) > 1)
    rank = int(test_set.catalog.rank([tuple(map(int, key.split(",")))])[0])
    answers = Answers("x", True, [[tokens_of(test_set, rank)]], 0.0)
    for place, item in enumerate(items):
        test = replace(
            test_set, prompts=test_set.prompts[:1], items=[(item,)], sids=[(rank,)], users=np.zeros(1, np.int64)
        )
        found = figures(answers, test, 50)
        assert found.per_sid["HR@1"][0] == 1
        hits = [found.per_item[f"HR@{k}"][0] for k in (1, 3, 5, 10, 20, 50)]
        assert hits == [float(place < k) for k in (1, 3, 5, 10, 20, 50)]


def test_tokens_that_are_no_semantic_id(test_set: TestSet) -> None:
    tokens = tokens_of(test_set, 7)
    layout = test_set.layout
    assert codes_of(tokens, layout) == codes_of(tokens[:-1], layout) == tuple(test_set.catalog.sids[7].tolist())
    for bad in (tokens[:-2], (*tokens, 1), (*tokens[:-1], 1), (0, *tokens[1:-1]), (tokens[1], tokens[0], tokens[2])):
        assert codes_of(bad, layout) is None


def test_transformers_has_the_same_figures_in_float32(suite_context: SuiteContext) -> None:
    """The same checkpoint through ``generate(prefix_allowed_tokens_fn)``, with the trie and without."""
    chosen = settings(n=10, sample=24, space=ScoreSpace.VOCAB)
    test = load_test_set(suite_context, chosen.sample)
    ours = suite.judged(OURS, suite_context, test, chosen)
    theirs = suite.judged(parse_engine("transformers"), suite_context, test, chosen)
    for one, other in zip(ours, theirs, strict=True):
        assert one.answers.lists == other.answers.lists
        for name in one.figures.per_sid:
            assert round(one.figures.mean(name), 3) == round(other.figures.mean(name), 3)
        check = compared(one, other, test, chosen, seed=0)
        assert check.data["same_lists"] == len(test)
        assert check.outcome is Outcome.INCONCLUSIVE, "24 users cannot show a difference below 0.01"
    assert [found.answers.trie for found in ours] == [True, False]


@pytest.mark.slow
def test_a_server_has_the_figures_of_the_engine_in_process(suite_context: SuiteContext, tmp_path: Path) -> None:
    test, chosen = load_test_set(suite_context, USERS), settings()
    arguments = ("--dtype", "float32", "--device", "cpu")
    with flashrec_server(
        suite_context.model_path, sid_vocab_file=suite_context.sid_vocab_file, arguments=arguments, log_dir=tmp_path
    ) as server:
        theirs = suite.judged(parse_engine(server.url), suite_context, test, chosen)
    ours = suite.judged(OURS, suite_context, test, chosen)
    assert [found.answers.lists for found in theirs] == [found.answers.lists for found in ours]


def shifted(test: TestSet, found: Judged, rows: int) -> Judged:
    """``found`` with the first ``rows`` lists emptied of their hits."""
    lists = [[] if index < rows else listed for index, listed in enumerate(found.answers.lists)]
    answers = replace(found.answers, engine="damaged", lists=lists)
    return Judged(answers, figures(answers, test, 10))


def test_a_worse_engine_fails_and_a_better_one_passes(suite_context: SuiteContext) -> None:
    chosen = settings(n=10, sample=300, trie=(True,))
    test = load_test_set(suite_context, chosen.sample)
    lists = [[tokens_of(test, targets[0])] for targets in test.sids]
    answers = Answers("perfect", True, lists, 0.0)
    perfect = Judged(answers, figures(answers, test, 10))
    worse = shifted(test, perfect, 30)
    assert compared(worse, perfect, test, chosen, seed=0).outcome is Outcome.FAIL
    assert compared(perfect, worse, test, chosen, seed=0).outcome is Outcome.PASS
    assert compared(shifted(test, perfect, 2), perfect, test, chosen, seed=0).outcome is Outcome.INCONCLUSIVE
    assert compared(perfect, perfect, test, chosen, seed=0).outcome is Outcome.PASS


def test_the_gate_compares_three_pairs_and_repeats_itself(
    suite_context: SuiteContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "QUICK_ROWS", 16)
    monkeypatch.setattr(gate, "QUICK_BOUND", 0.5)
    checks = gate.run(replace(suite_context, quick=True))
    assert [check.name.count("against") for check in checks] == [1, 1, 1]
    assert [check.outcome for check in checks] == [Outcome.PASS] * 3
    assert "flashrec:dtype=bfloat16,quantization=fp8" in checks[1].repeat
    assert checks[1].name == "flashrec:dtype=bfloat16,quantization=fp8, trie on against transformers"
    assert checks[1].data["same_lists"] < checks[1].data["rows"] or checks[0].data["same_lists"] < 16, (
        "bf16 and FP8 that return float32's lists everywhere have not run"
    )


def test_the_gate_judges_an_fp8_checkpoint_by_its_dequantised_weights(
    suite_context: SuiteContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "QUICK_ROWS", 16)
    monkeypatch.setattr(gate, "QUICK_BOUND", 0.5)
    (check,) = gate.run(replace(suite_context, model_path=quantized_copy(suite_context.model_path, tmp_path / "fp8")))
    assert check.name == "flashrec:dtype=bfloat16, trie on against transformers"
    assert check.outcome is Outcome.PASS
    assert check.data["rows"] == 16


def test_the_gate_is_not_run_where_it_cannot_be(suite_context: SuiteContext, tmp_path: Path) -> None:
    for context, reason in (
        (replace(suite_context, sid_vocab_file=None), "needs a catalog"),
        (replace(suite_context, sequences=tmp_path / "none.csv"), "no held-out histories"),
    ):
        (check,) = gate.run(context)
        assert check.outcome is Outcome.NOT_RUN
        assert reason in check.reason


def test_engines_by_name() -> None:
    assert parse_engine("https://host:1/x") == EngineSpec("https://host:1/x", {})
    spec = parse_engine("flashrec:dtype=bfloat16,quantization=fp8")
    assert (spec.kind, dict(spec.fields)) == ("flashrec", {"dtype": "bfloat16", "quantization": "fp8"})
    assert str(spec) == "flashrec:dtype=bfloat16,quantization=fp8"
    for text in ("sglang", "transformers:quantization=fp8", "flashrec:dtype", "flashrec:model_path=x", ""):
        with pytest.raises(ConfigError):
            parse_engine(text)


def test_transformers_refuses_a_score_space_that_it_does_not_have(suite_context: SuiteContext) -> None:
    with pytest.raises(ConfigError, match="transformers has"):
        suite.run(suite_context, settings(engine=parse_engine("transformers"), space=ScoreSpace.SID))
