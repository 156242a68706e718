"""A drift that needs its wave is seen again when its bundle is replayed, and only while its cause is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from random_shop import MakeTask
from typer.testing import CliRunner

from flashrec_harness.cli import app
from flashrec_harness.determinism import suite
from flashrec_harness.determinism.judge import Evidence, drifting
from flashrec_harness.determinism.replay import replay
from flashrec_harness.determinism.worker import perform
from flashrec_harness.outcome import ExitCode, SuiteContext
from flashrec_harness.planting import PLANT_VARIABLE
from flashrec_harness.repro import BundleError, load_bundle


def repro(path: Path, *flags: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["repro", str(path), *flags], env={PLANT_VARIABLE: ""})
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize(
    ("fault", "axis"),
    [
        ("split-count-from-batch", "mixed"),
        ("rope-off-by-one-after-hit", "cache"),
        ("positions-restart-in-chunk", "chunks"),
        ("answers-swapped", "arrival"),
        ("unseeded-tie-break", "ties"),
    ],
)
def test_a_wave_is_red_with_its_fault_and_green_without(
    fault: str, axis: str, faults: ModuleType, context: SuiteContext, make_task: MakeTask
) -> None:
    task = make_task(axis)
    with faults.plant(fault):
        evidence = Evidence([perform(task)])
        seen = next(one for one in drifting(evidence) if one.observation.axis == axis)
        path = suite._keep_bundle(context, task, evidence, seen)
        code, said = repro(path)
        assert code == ExitCode.FAILED, said
    code, said = repro(path)
    assert code == ExitCode.OK, said
    assert f"determinism --only '{axis}'" in said


def test_a_bundle_found_with_a_planted_fault_says_how_to_replay_it(
    faults: ModuleType, context: SuiteContext, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``determinism --plant`` leaves it: the clean engine is green, the planted one red, and the bits are shown."""
    fault, task = "split-count-from-batch", make_task("mixed")
    with monkeypatch.context() as planting, faults.plant(fault):
        planting.setenv(PLANT_VARIABLE, fault)
        evidence = Evidence([perform(task)])
        path = suite._keep_bundle(context, task, evidence, next(iter(drifting(evidence))))
    code, said = repro(path)
    assert code == ExitCode.OK, said
    assert f"replayed without: --plant {fault} plants them" in said
    code, said = repro(path, "--plant", fault)
    assert code == ExitCode.FAILED, said
    assert "replayed without" not in said
    (different, *_) = [row for row in replay_planted(faults, fault, path) if not row["same"]]
    assert different["score wanted"] != different["score now"]


def replay_planted(faults: ModuleType, fault: str, path: Path) -> list[dict[str, Any]]:
    bundle = load_bundle(path)
    assert bundle.wave is not None
    assert list(bundle.planted) == [fault]
    with faults.plant(fault):
        return replay(bundle, bundle.wave)


def test_the_bundle_holds_the_wave_in_order(faults: ModuleType, context: SuiteContext, make_task: MakeTask) -> None:
    task = make_task("mixed")
    with faults.plant("split-count-from-batch"):
        evidence = Evidence([perform(task)])
    (seen,) = drifting(evidence)
    bundle = load_bundle(suite._keep_bundle(context, task, evidence, seen))
    assert bundle.wave is not None
    assert bundle.wave.at == seen.observation.place
    assert len(bundle.wave.requests) == seen.observation.requests > 1
    assert sum(one["n"] for one in bundle.wave.requests) == seen.observation.rows
    assert bundle.wave.requests[bundle.wave.at] == bundle.request
    assert {row["cache"] for row in replay(bundle, bundle.wave)} == {"cold", "warm"}


def test_what_cannot_be_replayed_is_refused(faults: ModuleType, context: SuiteContext, make_task: MakeTask) -> None:
    task = make_task("mixed")
    with faults.plant("split-count-from-batch"):
        evidence = Evidence([perform(task)])
    (seen,) = drifting(evidence)
    bundle = load_bundle(suite._keep_bundle(context, task, evidence, seen))
    assert bundle.wave is not None
    elsewhere = [{**one, "catalog": "listed"} for one in bundle.wave.requests]
    with pytest.raises(BundleError, match=r"catalogs that the suite loaded.*--only 'mixed'"):
        replay(bundle, replace(bundle.wave, requests=elsewhere))
    with pytest.raises(BundleError, match="no axis 'sideways'"):
        replay(bundle, replace(bundle.wave, axis="sideways"))


def test_a_bundle_of_one_request_is_still_read(tmp_path: Path) -> None:
    fields = dict.fromkeys(("suite", "reason", "request", "engine", "digests", "observed"), "")
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 1, **fields}))
    assert load_bundle(path).wave is None
