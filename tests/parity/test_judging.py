"""The order of a judgement: a checkpoint that changes under it makes it invalid."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flashrec.request import ScoreSpace
from flashrec_harness import sglang_env
from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.cases import catalog_cases
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.plan import Group, Reference
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.parity.suite import judge
from flashrec_harness.references.types import RankedList, SearchCase


class Meddler(EngineSubject):
    """An engine whose checkpoint is written to while it answers."""

    def search(self, cases: list[SearchCase]) -> list[RankedList]:  # type: ignore[override]
        answers = super().search(cases)
        config = self._ground.model_path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"note": "new"}), encoding="utf-8")
        return answers


@pytest.fixture
def own(edge: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.delenv(sglang_env.URL_VARIABLE, raising=False)
    monkeypatch.setenv(sglang_env.PYTHON_VARIABLE, "/nowhere/python")
    return replace(edge, model_path=Path(shutil.copytree(edge.model_path, tmp_path / "model")))


def groups(ground: Ground) -> list[Group]:
    cases = catalog_cases(ground, ScoreSpace.CHILDREN, 4, seed=2, catalog="2 levels")
    return [Group("catalog", ScoreSpace.CHILDREN, tuple(cases), tuple(Reference))]


def test_every_reference_gets_its_check_and_an_absent_one_says_why(own: Ground, tmp_path: Path) -> None:
    checks = judge(own, lambda _: groups(own), [EngineSubject(own)], tmp_path / "out")
    outcomes = {check.name: check.outcome for check in checks}
    assert outcomes == {
        "transformers, children, catalog": Outcome.PASS,
        "SGLang, children, catalog": Outcome.NOT_RUN,
        "float64 oracle, children, catalog": Outcome.PASS,
    }


def test_a_checkpoint_that_changes_meanwhile_makes_the_run_invalid(own: Ground, tmp_path: Path) -> None:
    (check,) = judge(own, lambda _: groups(own), [Meddler(own)], tmp_path / "out")
    assert check.outcome is Outcome.INVALID
    assert "changed" in check.reason
