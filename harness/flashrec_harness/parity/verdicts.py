"""From everybody's answers to checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashrec.request import ScoreSpace
from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.parity import plan
from flashrec_harness.parity.answers import Answers
from flashrec_harness.parity.compare import Explain, Tolerance
from flashrec_harness.parity.comparison import SUITE, Comparison
from flashrec_harness.parity.evidence import save_evidence
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.plan import Group, Reference
from flashrec_harness.parity.precision import FLOAT32, ScoreErrors, float64_error, fp8_error, transformers_error
from flashrec_harness.parity.subjects import JudgedSearcher
from flashrec_harness.references.dequantized import is_fp8
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.oracle import Oracle, explain
from flashrec_harness.references.types import SearchCase

_MEASURED_CASES = 40


@dataclass(frozen=True)
class Bench:
    """What a subject is judged by: the groups, the references' answers, and the oracle if there is one."""

    ground: Ground
    groups: Sequence[Group]
    answers: Mapping[Reference, Answers]
    oracle: Oracle | None
    out_dir: Path

    @property
    def explain(self) -> Explain | None:
        oracle = self.oracle
        return None if oracle is None else lambda case, ranked, band: explain(oracle, case, ranked, band)


def judge_subject(bench: Bench, subject: JudgedSearcher, ours: Answers) -> list[Check]:
    """One check per group and reference."""
    tolerance = _tolerance(bench, subject, ours)
    checks = []
    for group in bench.groups:
        for reference in group.references:
            check = _check(bench, group, reference, subject, ours, tolerance)
            check.data |= {
                "checkpoint": bench.ground.name,
                "search": group.title,
                "space": str(group.space),
                "reference": str(reference),
                "judged": subject.label,
            }
            checks.append(check)
    return checks


def _check(
    bench: Bench,
    group: Group,
    reference: Reference,
    subject: JudgedSearcher,
    ours: Answers,
    tolerance: Tolerance | None,
) -> Check:
    name = group.name(reference) + (f", {subject.label}" if subject.label else "")
    theirs = bench.answers[reference]
    cases = [case for case in group.cases if case in ours]
    absence = theirs.absence(group.cases) or (None if cases else ours.absence(group.cases))
    if absence is not None:
        return Check(SUITE, name, absence.outcome, "nothing was compared", absence.reason)
    if tolerance is None:
        precision = "FP8" if is_fp8(bench.ground.model_path) else subject.dtype
        reason = f"{precision} is judged by its float64 error, and there is no float64 oracle here"
        return Check(SUITE, name, Outcome.NOT_RUN, "nothing was compared", reason)
    comparison = Comparison.of(name, cases, ours.lists(cases), theirs.lists(cases), bench.explain, tolerance)
    check = comparison.check()
    refused = ours.absence(group.cases)
    if refused is not None:
        check.summary += f"; {len(group.cases) - len(cases)} lists not asked for ({refused.reason})"
    check.summary += theirs.note
    save_evidence(comparison, check, subject, bench.out_dir)
    return check


def _tolerance(bench: Bench, subject: JudgedSearcher, ours: Answers) -> Tolerance | None:
    """Fixed for float32; measured for anything less, FP8 included, for which it takes the oracle."""
    fp8 = is_fp8(bench.ground.model_path)
    if subject.dtype == "float32" and not fp8:
        return FLOAT32
    if bench.oracle is None:
        return None
    cases = [case for case in plan.cases_for(bench.groups) if case in ours]
    lists = ours.lists(cases)
    error = float64_error(bench.oracle, cases, lists)
    if fp8:
        return ScoreErrors(error, fp8_error(bench.oracle, cases, lists)).tolerance(fp8=True)
    return ScoreErrors(error, transformers_error(bench.oracle, bench.ground, yardstick_cases(cases))).tolerance()


def yardstick_cases(cases: Sequence[SearchCase]) -> Sequence[SearchCase]:
    """About :data:`_MEASURED_CASES` of ``cases``, spread over all, as searches that ``transformers`` can make.

    The error of a sum of log-probabilities is the model's; where ``transformers`` lacks a score space, ``vocab``
    shows it too.
    """
    spread = cases[:: max(1, len(cases) // _MEASURED_CASES)]
    own = TransformersReference.spaces
    return [
        replace(case, semantics="transformers", space=case.space if case.space in own else ScoreSpace.VOCAB)
        for case in spread
    ]


def references_agree(bench: Bench) -> list[Check]:
    """SGLang against ``transformers`` on the searches that both answered.

    If the references do not agree, what was measured with them means nothing: *invalid*, not a failure.
    """
    sglang, transformers = bench.answers[Reference.SGLANG], bench.answers[Reference.TRANSFORMERS]
    cases = [case for case in plan.cases_for(bench.groups) if case in sglang and case in transformers]
    if not cases:
        return []
    comparison = Comparison.of(
        f"{Reference.SGLANG} against {Reference.TRANSFORMERS}, {bench.ground.name}",
        cases,
        sglang.lists(cases),
        transformers.lists(cases),
        bench.explain,
    )
    check = comparison.check(plots=False)
    if check.outcome is Outcome.FAIL:
        check.outcome = Outcome.INVALID
    return [check]
