"""A differing list leaves its two sides and a bundle that replays it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashrec.request import ScoreSpace
from flashrec_harness.cli import app
from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.cases import catalog_cases
from flashrec_harness.parity.comparison import Comparison
from flashrec_harness.parity.evidence import save_evidence
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.types import RankedList


@pytest.fixture(scope="module")
def comparisons(edge: Ground, edge_oracle: Oracle) -> tuple[EngineSubject, Comparison, Comparison]:
    """The engine's lists as they are, and against a reference that wants the first two exchanged."""
    subject = EngineSubject(edge)
    cases = catalog_cases(edge, ScoreSpace.SID, 6, seed=5, catalog="3 levels")
    ours, theirs = subject.search(cases), edge_oracle.search(cases)
    wrong = [*theirs[:-1], _exchanged(theirs[-1])]
    good = Comparison.of("good", cases, ours, theirs, explain=None)
    bad = Comparison.of("oracle, sid", cases, ours, wrong, explain=None)
    return subject, good, bad


def _exchanged(ranked: RankedList) -> RankedList:
    first, second = ranked[:2]
    return (replace(second, score=first.score), replace(first, score=second.score), *ranked[2:])


def test_a_pass_leaves_nothing(comparisons: tuple[EngineSubject, Comparison, Comparison], tmp_path: Path) -> None:
    subject, good, _ = comparisons
    check = good.check()
    save_evidence(good, check, subject, tmp_path)
    assert check.outcome is Outcome.PASS
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_listed_and_its_bundle_replays(
    comparisons: tuple[EngineSubject, Comparison, Comparison], tmp_path: Path
) -> None:
    subject, good, bad = comparisons
    check = bad.check()
    save_evidence(bad, check, subject, tmp_path)
    assert check.outcome is Outcome.FAIL
    (listed,) = json.loads(Path(check.data["listing"]).read_text(encoding="utf-8"))
    assert listed["lists"][0]["ours"] == listed["lists"][1]["reference"]
    (bundle,) = check.bundles
    assert check.commands == [f"python -m flashrec_harness repro {bundle}"]
    saved = json.loads(Path(bundle).read_text(encoding="utf-8"))
    assert saved["ledger"], "the request was replayed without its ledger"

    red = CliRunner().invoke(app, ["repro", bundle])
    assert (red.exit_code, "oracle, sid" in red.output) == (1, True)

    saved["expected"] = [{"token_ids": list(h.token_ids), "score": h.score} for h in good.verdicts[-1].theirs]
    Path(bundle).write_text(json.dumps(saved), encoding="utf-8")
    green = CliRunner().invoke(app, ["repro", bundle])
    assert green.exit_code == 0, green.output
    saved["expected"][0]["score"] -= 0.01
    Path(bundle).write_text(json.dumps(saved), encoding="utf-8")
    assert CliRunner().invoke(app, ["repro", bundle]).exit_code == 1
