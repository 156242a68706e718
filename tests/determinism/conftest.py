"""A random Qwen3 of a few thousand parameters with a catalog, and tasks small enough for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.suite import EVERYWHERE
from flashrec_harness.determinism.task import Task, make_tasks, suite_prompts
from flashrec_harness.material import load_material
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.planting import PLANT_VARIABLE

WORDS, CODES, DEPTH = 96, 16, 3
CPU_AXES = tuple(name for name, axis in AXES.items() if not axis.needs_gpu)

MakeTask = Callable[..., Task]


def write_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "embed" in name:
                parameter.mul_(6)
    model.save_pretrained(path)


def write_tokenizer(path: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    codes = [f"<s_{level}_{code}>" for level in "abc"[:DEPTH] for code in range(CODES)]
    names = ["<|sid_begin|>", *codes, "<|sid_end|>"]
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    tokenizer.save_pretrained(path)


def write_catalog(path: Path) -> None:
    drawn = np.random.default_rng(0).integers(0, CODES, (400, DEPTH))
    sids = sorted({tuple(codes) for codes in drawn.tolist()})
    path.write_text(json.dumps({",".join(map(str, sid)): [f"item{rank}"] for rank, sid in enumerate(sids)}))


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
        from dataclasses import replace

        task = make_tasks(context, prompts, CPU_AXES, EVERYWHERE)[process]
        return replace(task, axes=tuple(dict.fromkeys(("alone", *axes))), runs=runs)

    return make


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package of planted faults, which the environment must name."""
    monkeypatch.setenv(PLANT_VARIABLE, "any")
    import flashrec_harness.faults as package

    monkeypatch.setenv(PLANT_VARIABLE, ",".join(package.FAULTS))
    return package
