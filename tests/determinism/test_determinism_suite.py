"""The whole suite on the bundled checkpoint, and what it does when something is wrong or missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from random_shop import CPU_AXES, MakeTask

from flashrec_harness import hardware
from flashrec_harness.determinism import golden, over_http, suite
from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.judge import Evidence, drifting, judge
from flashrec_harness.determinism.records import ProcessReport
from flashrec_harness.determinism.suite import run
from flashrec_harness.determinism.worker import perform
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.planting import PLANT_VARIABLE
from flashrec_harness.repro import load_bundle
from flashrec_harness.runner import guarded
from flashrec_harness.servers import flashrec_server


@pytest.mark.slow
def test_the_bundled_checkpoint_does_not_drift(suite_context: SuiteContext) -> None:
    checks = {check.name: check for check in run(suite_context)}
    wrong = {
        name: check.reason for name, check in checks.items() if check.outcome not in (Outcome.PASS, Outcome.NOT_RUN)
    }
    assert not wrong
    line = checks["same bits in 120 mixed waves of 4 processes"]
    assert line.outcome is Outcome.PASS
    assert line.data["waves"] >= 120
    assert line.data["bound"] < 3 / 120
    assert checks[over_http.NAME].outcome is Outcome.PASS
    left = {name for name, check in checks.items() if check.outcome is Outcome.NOT_RUN} - {"golden digests"}
    gpu_only = {axis.title for axis in AXES.values() if axis.needs_gpu}
    assert left == (set() if hardware.has_gpu() else gpu_only)


def test_a_planted_fault_reaches_the_server_and_no_verdict_hides_it(
    faults: ModuleType, context: SuiteContext, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLANT_VARIABLE, "answers-swapped")
    found = over_http.check(context, make_task(), suite.child_environment(0), None)
    assert found.outcome is Outcome.FAIL
    assert "rank 1" in found.reason
    confessed, *_ = guarded("determinism", context, lambda _: [found])
    assert confessed.outcome is Outcome.INVALID
    assert "answers-swapped" in confessed.reason


def test_a_running_server_is_judged_from_outside(context: SuiteContext) -> None:
    with flashrec_server(context.model_path, sid_vocab_file=context.sid_vocab_file) as server:
        judged, left = run(replace(context, url=server.url))
    assert judged.outcome is Outcome.PASS
    assert judged.data["requests"] >= 240
    assert judged.data["waves"] < judged.data["requests"]
    assert left.outcome is Outcome.NOT_RUN


def test_without_a_catalog_what_needs_one_is_not_run(
    context: SuiteContext, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = replace(context, sid_vocab_file=None)

    def in_this_process(tasks: list[suite.Task], _: Path) -> list[ProcessReport]:
        return [
            replace(perform(replace(task, runs=2)), hash_seed=seed)
            for task, seed in zip(tasks, suite.HASH_SEEDS, strict=True)
        ]

    monkeypatch.setattr(suite, "run_processes", in_this_process)
    monkeypatch.setattr(over_http, "check", lambda *_: Check("determinism", over_http.NAME, Outcome.PASS, ""))
    checks = run(free)
    assert not [check.name for check in checks if check.outcome is Outcome.FAIL]
    for axis in AXES.values():
        (check,) = [check for check in checks if check.name == axis.title] or [None]
        if axis.needs_catalog:
            assert check is not None
            assert (check.outcome, check.reason) == (Outcome.NOT_RUN, "the checkpoint is judged without a catalog")


def test_a_drifting_request_is_kept_as_a_bundle(faults: ModuleType, context: SuiteContext, make_task: MakeTask) -> None:
    with faults.plant("rope-off-by-one-after-hit"):
        report = perform(make_task("cache"))
    evidence = Evidence([report])
    task = make_task("cache")
    bundles = {seen.observation.probe: suite._keep_bundle(context, task, evidence, seen) for seen in drifting(evidence)}
    checks = judge([report], [task])
    suite.name_bundles(checks, evidence, bundles)
    named = {check.data["axis"]: check.bundles for check in checks if check.data.get("axis")}
    assert named["cache"] == [str(context.out_dir / "drift-default.json")]
    assert named["alone"] == []
    bundle = load_bundle(Path(named["cache"][0]))
    assert bundle.expected != bundle.observed
    assert len(bundle.ledger) == 3
    assert tuple(bundle.request["input_ids"]) == make_task().prompts[0]


def test_golden_digests_name_the_probe_and_the_step(
    faults: ModuleType, context: SuiteContext, make_task: MakeTask, tmp_path: Path
) -> None:
    task = make_task("spaces")
    before, again = perform(task), perform(task)
    with faults.plant("positions-restart-in-chunk"):
        after = perform(replace(make_task(), axes=("chunks", "spaces")))
    where = golden.environment_of(context)
    old, same, new = (golden.collect(Evidence([report]), where, "same") for report in (before, again, after))
    assert golden.changes(old, same) == []
    changed = {row["probe"]: row for row in golden.changes(old, new)}
    assert "step 0, request default, tensor positions" in changed["default"]["where"]
    assert "vocab" not in changed
    assert changed["width 1"]["where"] == "only in the older"

    directory = tmp_path / "kept"
    assert golden.against_stored(old, directory).outcome is Outcome.NOT_RUN
    kept = old.write(directory / old.stored_at)
    assert golden.load(kept) == old
    assert golden.against_stored(same, directory).outcome is Outcome.PASS
    differing = golden.against_stored(new, directory)
    assert differing.outcome is Outcome.INCONCLUSIVE
    assert "default: step 0" in differing.reason
    body = json.loads(kept.read_text())
    kept.write_text(json.dumps({**body, "made_with": {**body["made_with"], "torch": "1.0"}}))
    assert golden.against_stored(new, directory).reason == "made with other software: torch"
    assert golden.against_stored(same, directory).outcome is Outcome.PASS
    kept.write_text(json.dumps({**body, "inputs": {**body["inputs"], "catalog": "another"}}))
    refused = golden.against_stored(same, directory)
    assert (refused.outcome, refused.reason) == (Outcome.NOT_RUN, "other inputs: catalog")


def test_axes_are_dealt_out_in_the_quick_form_and_complete_in_the_full_one(context: SuiteContext) -> None:
    prompts = ((1, 2, 3),) * 12
    quick = suite.make_tasks(context, prompts, CPU_AXES, suite.EVERYWHERE)
    assert set().union(*(task.axes for task in quick)) == set(CPU_AXES)
    assert all({"alone", "mixed"} <= set(task.axes) for task in quick)
    full = suite.make_tasks(replace(context, quick=False), prompts, CPU_AXES, suite.EVERYWHERE)
    assert all(task.axes == CPU_AXES for task in full)
    assert sum(task.runs for task in quick) == sum(task.runs for task in full) == 120
