"""Tasks small enough for a test, on a random checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from random_shop import CPU_AXES, MakeTask, write_catalog, write_model, write_tokenizer

from flashrec_harness.determinism.suite import EVERYWHERE
from flashrec_harness.determinism.task import Task, make_tasks, suite_prompts
from flashrec_harness.material import load_material
from flashrec_harness.outcome import SuiteContext


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random-shop")
    write_model(path)
    write_tokenizer(path)
    write_catalog(path / "catalog.json")
    return path


@pytest.fixture
def context(checkpoint: Path, tmp_path: Path) -> SuiteContext:
    return SuiteContext(model_path=checkpoint, sid_vocab_file=checkpoint / "catalog.json", quick=True, out_dir=tmp_path)


@pytest.fixture
def make_task(context: SuiteContext) -> MakeTask:
    """``make_task(*axes, runs=.., process=..)``: the quick form's task, narrowed."""
    prompts = suite_prompts(context, load_material(context))

    def make(*axes: str, runs: int = 12, process: int = 0) -> Task:
        task = make_tasks(context, prompts, CPU_AXES, EVERYWHERE)[process]
        return replace(task, axes=tuple(dict.fromkeys(("alone", *axes))), runs=runs)

    return make
