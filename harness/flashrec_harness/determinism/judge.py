"""From what the processes saw to verdicts: drift per axis, its bound, its first cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashrec_harness.determinism.axes import AXES, Axis
from flashrec_harness.determinism.ledger_diff import first_beam, first_divergence
from flashrec_harness.determinism.records import Observation, ProcessReport
from flashrec_harness.determinism.task import PROCESSES, Task
from flashrec_harness.outcome import Check, Outcome

SUITE = "determinism"
MIN_WAVES = 120
_CONFIDENCE = 0.95
_LISTED = 20


def drift_bound(waves: int) -> float:
    """The drift rate that ``waves`` waves without drift rule out at 95 %: ``1 - 0.05 ** (1 / N)``, below ``3 / N``.

    Without a wave it is 1: nothing is ruled out.
    """
    return float(1.0 - (1.0 - _CONFIDENCE) ** (1.0 / waves)) if waves else 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """An observation and the process that made it."""

    report: ProcessReport
    observation: Observation


class Evidence:
    """All processes' observations; the reference of a probe is the first one made of it."""

    def __init__(self, reports: Sequence[ProcessReport]) -> None:
        self.reports = sorted(reports, key=lambda report: report.process)
        self.all = [Seen(report, one) for report in self.reports for one in report.observations]
        self.reference: dict[str, Seen] = {}
        for seen in self.all:
            self.reference.setdefault(seen.observation.probe, seen)

    def of_axis(self, name: str) -> list[Seen]:
        """The axis's observations, process by process."""
        return [seen for seen in self.all if seen.observation.axis == name]

    def drifts(self, seen: Seen) -> bool:
        """Whether the bits differ from the probe's reference."""
        return seen.observation.output != self.reference[seen.observation.probe].observation.output

    def witness(self, axis: str) -> dict[str, int]:
        """The axis's counters over all processes."""
        totals: dict[str, int] = {}
        for report in self.reports:
            for event, times in report.witness.get(axis, {}).items():
                totals[event] = totals.get(event, 0) + times
        return totals

    def explain(self, seen: Seen) -> dict[str, Any]:
        """One drifting wave as a row of a table: where, what differs, and the ledger's root cause."""
        one, want = seen.observation, self.reference[seen.observation.probe]
        expected = want.report.ledgers[want.observation.ledger]
        observed = seen.report.ledgers[one.ledger]
        cause = first_divergence(expected, observed, one.probe) if expected and observed else None
        return {
            "process": seen.report.process,
            "axis": one.axis,
            "case": one.case,
            "rows": one.rows,
            "place": one.place,
            "output": first_beam(want.report.outputs[want.observation.output], seen.report.outputs[one.output]),
            "cause": str(cause) if cause else "not in the ledger: the same records, or none",
        }


def judge(reports: Sequence[ProcessReport], tasks: Sequence[Task]) -> list[Check]:
    """A check per axis that ran, the one over processes first, and one over the ledgers themselves."""
    evidence = Evidence(reports)
    ran = [AXES[name] for name in AXES if any(name in task.axes for task in tasks)]
    checks = [across_processes(evidence)] if any(axis.name == "mixed" for axis in ran) else []
    checks += [judge_axis(evidence, axis, tasks[0]) for axis in ran if axis.name != "mixed"]
    return [*checks, judge_ledgers(evidence)]


def across_processes(evidence: Evidence) -> Check:
    """SPEC H2's line: N >= 120 mixed waves over at least four processes with different hash seeds.

    What counts is the witness: an observation whose requests were spread over several waves is none of a mixed wave.
    """
    found = evidence.of_axis("mixed")
    shared = evidence.witness("mixed").get("waves", 0)
    drifted = [seen for seen in found if evidence.drifts(seen)]
    seeds = [report.hash_seed for report in evidence.reports]
    rows = [seen.observation.rows for seen in found]
    check = Check(
        SUITE,
        f"same bits in {shared} mixed waves of {len(seeds)} processes",
        Outcome.FAIL if drifted else Outcome.PASS,
        f"{len(drifted)} of {len(found)} differ from the probe alone in process {evidence.reports[0].process}: token "
        f"ids and score bytes; {min(rows)}-{max(rows)} rows, {_sizes(found)} requests, PYTHONHASHSEED "
        f"{', '.join(seeds)}; {bound(len(drifted), shared)}",
        data={"waves": shared, "drifted": len(drifted), "hash_seeds": seeds, "bound": drift_bound(shared)},
    )
    if drifted:
        return _blame(check, evidence, drifted)
    if len(found) < MIN_WAVES or len(set(seeds)) < PROCESSES:
        check.outcome = Outcome.INVALID
        check.reason = f"{MIN_WAVES} waves of {PROCESSES} processes with different hash seeds are needed"
    elif shared < MIN_WAVES:
        check.outcome = Outcome.INVALID
        check.reason = (
            f"the requests of {len(found) - shared} of {len(found)} turns did not share one wave, and {MIN_WAVES} "
            "shared waves are needed: the rows or pages of a wave do not hold them; free device memory for a larger KV "
            "pool, or judge with shorter prompts (--sequences)"
        )
    return check


def judge_axis(evidence: Evidence, axis: Axis, task: Task) -> Check:
    """Drift is a failure, and so is a forbidden event; without its proof the axis has shown nothing."""
    found, witness = evidence.of_axis(axis.name), evidence.witness(axis.name)
    drifted = [seen for seen in found if evidence.drifts(seen)]
    shown = ", ".join(f"{times} {event}" for event, times in witness.items() if event in (*axis.proves, *axis.forbids))
    scope = axis.scope(task)
    check = Check(
        SUITE,
        axis.title,
        Outcome.FAIL if drifted else Outcome.PASS,
        f"{axis.name}{f', {scope}' if scope else ''}: {len(drifted)} of {len(found)} waves drift; seen: {shown}; "
        f"{bound(len(drifted), len(found))}",
        data={"axis": axis.name, "waves": len(found), "drifted": len(drifted), "witness": witness},
    )
    forbidden = [event for event in axis.forbids if witness.get(event)]
    missing = [event for event in (*axis.proves, *axis.covers(task)) if not witness.get(event)]
    if drifted:
        return _blame(check, evidence, drifted)
    if forbidden:
        check.outcome, check.reason = Outcome.FAIL, f"{witness[forbidden[0]]} {forbidden[0]}"
    elif missing or not found:
        check.outcome = Outcome.INVALID
        check.reason = f"never happened: {', '.join(missing) or 'a wave'}; the axis has shown nothing"
    return check


def judge_ledgers(evidence: Evidence) -> Check:
    """Waves with equal outputs must have equal ledgers, or a ledger could not be trusted to name a cause."""
    recorded = [seen for seen in evidence.all if seen.observation.ledger]
    odd = [seen for seen in recorded if not evidence.drifts(seen) and _ledger_differs(evidence, seen)]
    check = Check(
        SUITE,
        "ledgers agree where outputs do",
        Outcome.FAIL if odd else Outcome.PASS,
        f"{len(odd)} of {len(recorded)} ledgers differ from the reference's although the output is the same",
    )
    if not recorded:
        check.outcome, check.reason = Outcome.NOT_RUN, "a search without a catalog records no ledger"
    elif odd:
        check.rows = [evidence.explain(seen) for seen in odd[:_LISTED]]
        check.reason = check.rows[0]["cause"]
    return check


def _ledger_differs(evidence: Evidence, seen: Seen) -> bool:
    return seen.observation.ledger != evidence.reference[seen.observation.probe].observation.ledger


def _blame(check: Check, evidence: Evidence, drifted: Sequence[Seen]) -> Check:
    check.rows = [evidence.explain(seen) for seen in drifted[:_LISTED]]
    first = check.rows[0]
    check.reason = f"process {first['process']}, {first['case']}: {first['output']}; {first['cause']}"
    return check


def drifting(evidence: Evidence) -> Iterator[Seen]:
    """The first drifting wave of each probe, for repro bundles."""
    named: set[str] = set()
    for seen in evidence.all:
        if evidence.drifts(seen) and seen.observation.probe not in named:
            named.add(seen.observation.probe)
            yield seen


def _sizes(found: Sequence[Seen]) -> str:
    sizes = [seen.observation.requests for seen in found]
    return f"{min(sizes)}-{max(sizes)}"


def bound(drifted: int, waves: int) -> str:
    """What a clean count of waves rules out, in words."""
    if drifted or not waves:
        return "no bound"
    return f"drift rate below {100 * drift_bound(waves):.1f} % at 95 %"
