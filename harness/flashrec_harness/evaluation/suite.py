"""``flashrec-harness eval``: figures of one engine with and without the trie, and intervals against others."""

from __future__ import annotations

import operator
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from flashrec.request import ScoreSpace
from flashrec_harness import quality
from flashrec_harness.evaluation.bootstrap import CONFIDENCE, RESAMPLES, Interval, paired_intervals
from flashrec_harness.evaluation.engines import EngineSpec, ask
from flashrec_harness.evaluation.figures import Answers, Figures, figures
from flashrec_harness.evaluation.testset import TestSet, load_test_set
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.targets import display_path

GATED = 10
"""Two engines are compared at this cutoff, or at the largest one that their lists reach."""
BOUND = 0.01
"""Difference in HR@10 and NDCG@10 below which two engines are called equal: one user in a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """``trie``: on, off, or both. ``sample``: so many rows, drawn by the context's seed; ``None``: all."""

    engine: EngineSpec
    versus: Sequence[EngineSpec] = ()
    n: int = 50
    space: ScoreSpace = ScoreSpace.SID
    trie: Sequence[bool] = (True, False)
    sample: int | None = None
    bound: float = BOUND


@dataclass(frozen=True, slots=True)
class Judged:
    """An engine's answers and what they are worth."""

    answers: Answers
    figures: Figures


def run(context: SuiteContext, settings: EvalSettings) -> list[Check]:
    """A check per engine and trie setting, and one per comparison.

    Raises :class:`~flashrec.errors.FlashRecError` for what cannot be judged.
    """
    test = load_test_set(context, settings.sample)
    first = judged(settings.engine, context, test, settings)
    checks = [_alone(found, test, settings) for found in first]
    for spec in settings.versus:
        others = judged(spec, context, test, settings)
        checks += [_alone(found, test, settings) for found in others]
        pairs = zip(first, others, strict=True)
        checks += [compared(one, other, test, settings, seed=context.seed) for one, other in pairs]
    for check in checks:
        check.repeat = command(context, settings)
    return checks


def judged(spec: EngineSpec, context: SuiteContext, test: TestSet, settings: EvalSettings) -> list[Judged]:
    """The engine on all rows, for each trie setting."""
    answers = ask(spec, context, test, n=settings.n, space=settings.space, trie=settings.trie)
    return [Judged(found, figures(found, test, settings.n)) for found in answers]


def _alone(found: Judged, test: TestSet, settings: EvalSettings) -> Check:
    """Passes unless a search within the catalog left it or repeated itself: figures alone judge nothing."""
    worth, trie = found.figures, found.answers.trie
    shown = [name for name in ("HR@1", "HR@10", "HR@50", "NDCG@10") if name in worth.per_sid]
    summary = (
        f"{', '.join(f'{name} {worth.mean(name):.4f}' for name in shown)}; "
        f"{100 * worth.invalid_rate:.2f} % of {worth.beams:,} beams are no item, "
        f"{100 * worth.duplicate_rate:.2f} % repeat one; {test.said}, n = {settings.n}, "
        f"{_space(found, settings)}, {found.answers.seconds:.0f} s"
    )
    wrong = trie and (worth.invalid_rate > 0 or worth.duplicate_rate > 0)
    return Check(
        "eval",
        _name(found),
        Outcome.FAIL if wrong else Outcome.PASS,
        summary,
        reason="a search within the catalog returned a beam that is no item, or one twice" if wrong else "",
        rows=worth.rows(),
        data={"invalid_rate": worth.invalid_rate, "duplicate_rate": worth.duplicate_rate, "rows": len(test)},
    )


def compared(one: Judged, other: Judged, test: TestSet, settings: EvalSettings, *, seed: int) -> Check:
    """``one`` against ``other`` on the same rows: a failure if it is worse beyond the bound."""
    intervals = paired_intervals(one.figures.per_sid, other.figures.per_sid, test.users, seed=seed)
    k = max(cutoff for cutoff in quality.CUTOFFS if cutoff <= min(settings.n, GATED))
    names = [f"HR@{k}", f"NDCG@{k}"]
    verdicts = {name: intervals[name].verdict(settings.bound) for name in names}
    same = sum(map(operator.eq, one.answers.lists, other.answers.lists))
    apart = max(abs(interval.difference) for interval in intervals.values())
    summary = (
        f"{'; '.join(f'{name} {_shown(intervals[name])}, {verdicts[name]}' for name in names)}; bound "
        f"{settings.bound:g}; {same:,} of {len(test):,} lists are the same, no figure differs by more than {apart:.4f};"
        f" {100 * CONFIDENCE:g} % paired bootstrap over {intervals[names[0]].users:,} users, {RESAMPLES:,} resamples"
    )
    worse = [name for name, verdict in verdicts.items() if verdict == "worse"]
    open_ = [name for name, verdict in verdicts.items() if verdict == "undecided"]
    outcome = Outcome.FAIL if worse else Outcome.INCONCLUSIVE if open_ else Outcome.PASS
    reason = f"worse: {', '.join(worse)}" if worse else f"more rows are needed for {', '.join(open_)}" if open_ else ""
    rows = [_row(name, one, other, interval) for name, interval in intervals.items()]
    name = f"{_name(one)} against {other.answers.engine}"
    data = {"same_lists": same, "rows": len(test), "largest_difference": apart}
    return Check("eval", name, outcome, summary, reason=reason, rows=rows, data=data)


def _row(name: str, one: Judged, other: Judged, interval: Interval) -> dict[str, object]:
    return {
        "metric": name,
        one.answers.engine: one.figures.mean(name),
        other.answers.engine: other.figures.mean(name),
        "difference": interval.difference,
        "from": interval.low,
        "to": interval.high,
        "rows that differ": interval.differing,
    }


def _shown(interval: Interval) -> str:
    return f"{interval.difference:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _name(found: Judged) -> str:
    return f"{found.answers.engine}, trie {'on' if found.answers.trie else 'off'}"


def _space(found: Judged, settings: EvalSettings) -> str:
    return f"score space {settings.space}" if found.answers.trie else "free search"


def command(context: SuiteContext, settings: EvalSettings) -> str:
    """The command line that repeats this."""
    parts = ["python", "-m", "flashrec_harness", "eval", "--model-path", display_path(context.model_path)]
    if context.sid_vocab_file is not None and context.sid_vocab_file.parent != context.model_path:
        parts += ["--sid-vocab-file", display_path(context.sid_vocab_file)]
    if context.sequences is not None:
        parts += ["--sequences", display_path(context.sequences)]
    parts += ["--sid", context.sid] if context.sid else []
    parts += ["--engine", str(settings.engine)]
    for spec in settings.versus:
        parts += ["--versus", str(spec)]
    trie = "both" if len(settings.trie) > 1 else "on" if settings.trie[0] else "off"
    parts += ["--n", str(settings.n), "--space", settings.space.value, "--trie", trie]
    parts += [] if settings.sample is None else ["--sample", str(settings.sample)]
    parts += ["--bound", f"{settings.bound:g}", "--seed", str(context.seed)]
    return shlex.join(parts)
