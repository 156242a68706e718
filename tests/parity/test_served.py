"""Judging a running server through its HTTP API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from flashrec.request import ScoreSpace
from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.cases import catalog_cases, for_sglang
from flashrec_harness.parity.comparison import Comparison
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.served import FlashRecSubject, served_subject
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.references.types import SearchCase
from flashrec_harness.servers import flashrec_server

CATALOG = "3 levels"


@pytest.fixture(scope="module")
def served(edge: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlashRecSubject]:
    with flashrec_server(
        edge.model_path,
        sid_vocab_file=edge.catalogs[CATALOG].path,
        arguments=("--dtype", "float32", "--device", "cpu"),
        log_dir=tmp_path_factory.mktemp("flashrec"),
    ) as server:
        subject = served_subject(server.url)
        assert isinstance(subject, FlashRecSubject)
        yield subject
        subject.close()


def searches(edge: Ground) -> list[SearchCase]:
    within = [
        case
        for space in ScoreSpace
        for case in catalog_cases(edge, space, 5, 1, catalog=CATALOG, filtered=True, penalties=(1.0, 0.5))
    ]
    free = [
        SearchCase(name=f"free-{n}", prompt=prompt, n=n, beam_width=n, max_tokens=4, stop_token_ids=stops)
        for n, prompt, stops in zip((1, 4, 16), edge.prompts, ((), (64, 99), (64,)), strict=False)
    ]
    return [*within, *for_sglang(free)]


def test_the_server_answers_as_the_engine_does(edge: Ground, served: FlashRecSubject) -> None:
    cases = searches(edge)
    assert [case.name for case in cases if served.refusal(case)] == []
    assert (served.name, served.dtype, served.fp8) == ("flashrec", "float32", False)
    comparison = Comparison.of("served", cases, served.search(cases), EngineSubject(edge).search(cases), None)
    outcome, reason = comparison.outcome()
    assert outcome is Outcome.PASS, reason
    assert comparison.worst_score_error == 0.0, "the API changed a score's bits"


def test_an_fp8_server_is_known_by_the_product_that_it_runs() -> None:
    info = {"engine": {"dtype": "float32", "kernels": {"linear_fp8": "torch"}}, "engine_config": {}}
    assert FlashRecSubject("http://server", info).fp8


def test_what_generate_cannot_be_asked_is_refused_beforehand(edge: Ground, served: FlashRecSubject) -> None:
    (free,) = [case for case in searches(edge) if case.name == "free-4"]
    assert "SGLang's rules" in served.refusal(replace(free, semantics="transformers"))
    (scored,) = catalog_cases(edge, ScoreSpace.SID, 1, 1, catalog=CATALOG, score_end=True)
    assert "score_end" in served.refusal(scored)
