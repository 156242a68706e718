"""The suite: tasks to child processes, their reports to checks, then the server and the golden digests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from flashrec import Beam, Result, ScoreSpace
from flashrec.errors import ConfigError
from flashrec_harness import hardware
from flashrec_harness.children import run_module
from flashrec_harness.determinism import golden, over_http
from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.judge import SUITE, Evidence, Seen, drifting, judge
from flashrec_harness.determinism.lab import engine_config
from flashrec_harness.determinism.records import OutputBeam, ProcessReport, bits_float, wave_key
from flashrec_harness.determinism.sharing import processes_at_once
from flashrec_harness.determinism.task import PROCESSES, Task, make_tasks, suite_prompts
from flashrec_harness.material import Prompt, load_material, prompts_digest
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.references.dequantized import is_fp8
from flashrec_harness.repro import Wave, request_of, save_bundle
from flashrec_harness.targets import display_path

HASH_SEEDS = ("0", "1", "20111", "4294967295")
EVERYWHERE = frozenset({"alone", "mixed"})
"""Axes of every process; the quick form gives each of the others to one process, unless it is the only one."""

_PROCESS_TIMEOUT_S = 1800.0


def run(context: SuiteContext) -> list[Check]:
    """Judge a checkpoint; with ``context.url``, a running server from outside."""
    prompts = suite_prompts(context, load_material(context))
    axes = tuple(name for name in _chosen(context) if not _why_not(name, context))
    tasks = _tasks(context, prompts, axes)
    if context.url is not None:
        reason = "--url: a running server is judged from outside"
        left = Check(SUITE, "same bits in process", Outcome.NOT_RUN, "waves were not composed here", reason=reason)
        return [over_http.check(context, tasks[0], {}, None), left]
    reports = run_processes(tasks, context.out_dir)
    evidence = Evidence(reports)
    checks = judge(reports, tasks)
    bundles = {seen.observation.probe: _keep_bundle(context, tasks[0], evidence, seen) for seen in drifting(evidence)}
    name_bundles(checks, evidence, bundles)
    if context.only is not None:
        return checks
    reference = evidence.reference["default"]
    in_process = reference.report.outputs[reference.observation.output]
    environment = child_environment(len(HASH_SEEDS), processes_at_once(context.model_path))
    checks.append(over_http.check(context, tasks[0], environment, in_process))
    checks.append(_golden(context, evidence, tasks[0]))
    return checks + [
        Check(SUITE, AXES[name].title, Outcome.NOT_RUN, f"{name}: no wave ran", reason=why)
        for name in AXES
        if (why := _why_not(name, context))
    ]


def _tasks(context: SuiteContext, prompts: tuple[Prompt, ...], axes: tuple[str, ...]) -> list[Task]:
    """One per process; the quick form of a single axis needs no more than two processes."""
    if context.only is None:
        return make_tasks(context, prompts, axes, EVERYWHERE)
    tasks = make_tasks(context, prompts, axes, frozenset(axes))
    return tasks[::2] if context.quick and context.only != "mixed" else tasks


def _chosen(context: SuiteContext) -> tuple[str, ...]:
    """The axes to run: all, or the one that is asked for and ``alone``, which gives it its reference."""
    if context.only is None:
        return tuple(AXES)
    if context.only not in AXES or _why_not(context.only, context):
        raise ConfigError(f"--only {context.only}: no axis that runs here; there are {', '.join(AXES)}")
    return tuple(name for name in AXES if name in ("alone", context.only))


def _why_not(axis: str, context: SuiteContext) -> str:
    """Why an axis cannot run here; empty if it can."""
    if AXES[axis].needs_gpu and not hardware.has_gpu():
        return hardware.missing_gpu_reason()
    if AXES[axis].needs_catalog and context.sid_vocab_file is None:
        return "the checkpoint is judged without a catalog"
    if AXES[axis].needs_plain_weights and is_fp8(context.model_path):
        return "the checkpoint's weights are FP8: every axis runs on them"
    return ""


def child_environment(process: int, at_once: int = 1) -> dict[str, str]:
    """A hash seed of its own, and an equal share of the cores: the number of threads is the same for all."""
    threads = max(1, len(os.sched_getaffinity(0)) // at_once)
    seed = HASH_SEEDS[process] if process < len(HASH_SEEDS) else str(process)
    return {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": str(threads)}


def run_processes(tasks: Sequence[Task], directory: Path) -> list[ProcessReport]:
    """Every task in a fresh process. Raises :class:`~flashrec_harness.children.ChildError` if one fails."""
    directory.mkdir(parents=True, exist_ok=True)
    at_once = processes_at_once(Path(tasks[0].model_path))

    def perform(task: Task) -> ProcessReport:
        prefix = directory / f"process-{task.process}"
        task_file, report_file = prefix.with_suffix(".task.json"), prefix.with_suffix(".report.json")
        task_file.write_text(json.dumps(asdict(task)), encoding="utf-8")
        run_module(
            "flashrec_harness.determinism.worker",
            [str(task_file), str(report_file)],
            log=prefix.with_suffix(".log"),
            timeout_s=_PROCESS_TIMEOUT_S,
            env=child_environment(task.process, at_once),
        )
        return ProcessReport.read(report_file)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(perform, tasks))


def _golden(context: SuiteContext, evidence: Evidence, task: Task) -> Check:
    requests = f"{prompts_digest(task.prompts)}-n{task.width}"
    current = golden.collect(evidence, golden.environment_of(context), requests)
    if any(evidence.drifts(seen) for seen in evidence.all):
        return Check(SUITE, "golden digests", Outcome.NOT_RUN, "", reason="bits that drift are no reference")
    current.write(context.out_dir / golden.FILE)
    return golden.against_stored(current)


def name_bundles(checks: Sequence[Check], evidence: Evidence, bundles: Mapping[str, Path]) -> None:
    """Give each check that found drift the bundles of the probes that drifted on its axis."""
    for check in checks:
        if check.data.get("drifted"):
            on_axis = evidence.of_axis(check.data.get("axis", "mixed"))
            probes = dict.fromkeys(seen.observation.probe for seen in on_axis if evidence.drifts(seen))
            check.bundles = [display_path(bundles[probe]) for probe in probes]


def _keep_bundle(context: SuiteContext, task: Task, evidence: Evidence, seen: Seen) -> Path:
    """Save the drifting request, its wave, its ledger and what it gave elsewhere (SPEC H3b)."""
    one, want = seen.observation, evidence.reference[seen.observation.probe]
    requests = seen.report.waves[wave_key(one.probe, one.output)]
    at = [fields["rid"] for fields in requests].index(one.probe)
    return save_bundle(
        context.out_dir / f"drift-{one.probe}.json",
        suite=SUITE,
        reason=evidence.explain(seen)["output"],
        request=request_of(requests[at]),
        config=engine_config(task),
        result=_result(one.probe, seen.report.outputs[one.output]),
        expected=[_bundle_beam(beam) for beam in want.report.outputs[want.observation.output]],
        ledger=seen.report.ledgers[one.ledger],
        wave=Wave(one.axis, requests, at, AXES[one.axis].overrides(task)),
    )


def _result(rid: str, beams: Sequence[OutputBeam]) -> Result:
    return Result(
        rid=rid,
        beams=tuple(
            Beam(beam.token_ids, bits_float(beam.cumulative_bits), bits_float(beam.score_bits), "stop")
            for beam in beams
        ),
        prompt_tokens=0,
        cached_tokens=0,
        score_space=ScoreSpace.SID,
    )


def _bundle_beam(beam: OutputBeam) -> Mapping[str, object]:
    return {"token_ids": list(beam.token_ids), "score_bits": beam.score_bits}


__all__ = ["HASH_SEEDS", "PROCESSES", "child_environment", "run", "run_processes"]
