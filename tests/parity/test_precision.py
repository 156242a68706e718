"""bfloat16 is judged by its measured error: near-ties are allowed for, faults are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashrec.request import ScoreSpace
from flashrec.runtime import decode
from flashrec.search.expand import Expand, Expansion, select_expand
from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.parity.answers import Absence, Answers, asked
from flashrec_harness.parity.cases import catalog_cases
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.plan import Group, Reference
from flashrec_harness.parity.precision import FLOAT32, ScoreErrors, float64_error
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.parity.verdicts import Bench, judge_subject
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.oracle import Oracle


@pytest.fixture(scope="module")
def bench(
    edge: Ground,
    edge_oracle: Oracle,
    edge_transformers: TransformersReference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Bench:
    cases = catalog_cases(edge, ScoreSpace.CHILDREN, 26, seed=3, catalog="4 levels")
    group = Group("catalog", ScoreSpace.CHILDREN, tuple(cases), (Reference.ORACLE, Reference.TRANSFORMERS))
    answers = {
        Reference.ORACLE: asked(edge_oracle, cases),
        Reference.TRANSFORMERS: asked(edge_transformers, cases),
        Reference.SGLANG: Answers(),
    }
    return Bench(edge, [group], answers, edge_oracle, tmp_path_factory.mktemp("bench"))


def judge(bench: Bench, subject: EngineSubject) -> list[Check]:
    return judge_subject(bench, subject, asked(subject, bench.groups[0].cases))


def bfloat16(bench: Bench, **config: Any) -> EngineSubject:
    return EngineSubject(bench.ground, dtype="bfloat16", label="bfloat16", **config)


def test_bfloat16_passes_by_its_own_measure(bench: Bench) -> None:
    checks = judge(bench, bfloat16(bench))
    assert [check.outcome for check in checks] == [Outcome.PASS] * 2, [check.reason for check in checks]
    assert all(check.name.endswith(", bfloat16") for check in checks)
    assert checks[0].data["worst_score_difference"] > FLOAT32.score


def test_bfloat16_fails_by_the_measure_of_float32(bench: Bench) -> None:
    subject = bfloat16(bench)
    subject.dtype = "float32"
    assert [check.outcome for check in judge(bench, subject)] == [Outcome.FAIL] * 2


def test_a_fault_in_bfloat16_is_caught_all_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def next_row(expand: Expand) -> Expand:
        def spoilt(*step: Any) -> Expansion:
            expansion = expand(*step)
            return replace(expansion, parent=(expansion.parent + 1).clamp(max=int(expansion.parent.max())))

        return spoilt

    monkeypatch.setattr(decode, "select_expand", lambda ops: next_row(select_expand(ops)))
    checks = judge(bench, bfloat16(bench, invariance_check=False))
    assert [check.outcome for check in checks] == [Outcome.FAIL] * 2


def test_without_the_oracle_bfloat16_is_not_judged(bench: Bench) -> None:
    blind = replace(bench, oracle=None)
    checks = judge(blind, bfloat16(bench))
    assert {check.outcome for check in checks} == {Outcome.NOT_RUN}
    assert "float64" in checks[0].reason


def test_an_error_beyond_twice_that_of_transformers_is_not_tolerated() -> None:
    tolerance = ScoreErrors(ours=0.5, yardstick=0.01).tolerance()
    assert (tolerance.score, tolerance.tie_gap) == (0.02, 0.02)
    assert ScoreErrors(ours=0.005, yardstick=0.01).tolerance().tie_gap == 0.005


def test_the_error_is_measured_against_float64(bench: Bench, edge_oracle: Oracle) -> None:
    cases = bench.groups[0].cases[:6]
    lists = edge_oracle.search(cases)
    assert float64_error(edge_oracle, cases, lists) == pytest.approx(0.0, abs=1e-12)
    moved = [tuple(replace(h, score=h.score + 0.25) for h in ranked) for ranked in lists]
    assert float64_error(edge_oracle, cases, moved) == pytest.approx(0.25)


def test_what_a_subject_cannot_be_asked_is_said(bench: Bench, tmp_path: Path) -> None:
    subject = EngineSubject(bench.ground)
    cases = bench.groups[0].cases
    some = asked(subject, cases[:20])
    some.lack(cases[20:], Absence(Outcome.NOT_RUN, "it declined"))
    (check, _) = judge_subject(replace(bench, out_dir=tmp_path), subject, some)
    assert check.outcome is Outcome.PASS
    assert "20 lists" in check.summary
    assert "6 lists not asked for (it declined)" in check.summary
    none = Answers()
    none.lack(cases, Absence(Outcome.NOT_RUN, "it declined"))
    (check, _) = judge_subject(bench, subject, none)
    assert (check.outcome, check.reason) == (Outcome.NOT_RUN, "it declined")
