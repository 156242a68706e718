"""make_checkpoint: what it writes, that it repeats itself, and that it resumes to the same bits."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_samples import QUIET, SMALL_CONFIG, small_shop
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashrec.errors import CatalogError, CheckpointError
from flashrec.sid import infer_layout, load_catalog
from flashrec_harness.checkpoints.build import example_maker, make_checkpoint
from flashrec_harness.checkpoints.config import TrainingConfig
from flashrec_harness.checkpoints.sequences import History, read_histories
from flashrec_harness.checkpoints.training import STATE_FILE, loss_of, schedule
from flashrec_harness.prompts import PromptBuilder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    small_shop(out)
    return out


def test_the_directory_is_complete_and_loads(made: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.tie_word_embeddings
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.head_dim == 128
    assert model.config.vocab_size > len(AutoTokenizer.from_pretrained(made)), "some ids have no token"
    stored = load_file(made / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert not (made / STATE_FILE).exists()


def test_what_is_written_agrees(made: Path) -> None:
    layout = infer_layout(AutoTokenizer.from_pretrained(made))
    compact, table = load_catalog(made / "catalog.json", layout), load_catalog(made / "items.tsv", layout)
    assert compact.digest == table.digest
    assert table.titles is not None
    rows = read_histories(made / "test.csv")
    report = json.loads((made / "training.json").read_text())
    assert len(rows) == 12
    assert set(report["quality"]) == {"model", "popularity", "co-occurrence", "first-order Markov"}
    assert 0 < report["optimum"]["HR@10 expected"] <= 1


def test_the_same_seed_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    small_shop(tmp_path)
    for name in ("model.safetensors", "tokenizer.json", "catalog.json", "items.tsv", "test.csv"):
        assert (tmp_path / name).read_bytes() == (made / name).read_bytes(), name


def test_an_interrupted_run_resumes_to_the_same_bytes(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashrec_harness.checkpoints import training

    true_step = training._step
    calls = 0

    def failing_step(*arguments: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return true_step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "_step", failing_step)
    with pytest.raises(KeyboardInterrupt):
        small_shop(tmp_path)
    assert (tmp_path / STATE_FILE).exists()
    calls = 100
    small_shop(tmp_path)
    assert calls == 102, "steps 1 to 4 were saved, 5 and 6 were left"
    assert (tmp_path / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


def test_a_state_of_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashrec_harness.checkpoints import build

    small_shop(tmp_path)
    monkeypatch.setattr(build, "write_model", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        small_shop(tmp_path)
    other = replace(SMALL_CONFIG, training=replace(SMALL_CONFIG.training, learning_rate=1e-4))
    with pytest.raises(CheckpointError, match="other data or settings"):
        small_shop(tmp_path, config=other)


def test_examples_hold_the_tokens_of_the_whole_text(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    layout = infer_layout(tokenizer)
    catalog = load_catalog(made / "catalog.json", layout)
    builder = PromptBuilder(tokenizer, layout, catalog)
    maker = example_maker(builder, layout, catalog, max_history=10)
    for row in read_histories(made / "test.csv"):
        assert row.target is not None
        ids, counts = maker.encode([builder.rank(item) for item in (*row.items, row.target)])
        text = builder.text(row.items) + builder.sid_text(row.target) + "<|im_end|>"
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids[: -layout.depth - 3] == list(builder.prompt(row.items))
        counted = [token for token, counted in zip(ids, counts, strict=True) if counted]
        answers = len(row.items) * (layout.depth + 1) + layout.depth + 3
        assert len(counted) == answers
        assert counted[-(layout.depth + 3)] == layout.begin


def test_the_loss_is_the_mean_over_counted_tokens(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made)
    layout = infer_layout(tokenizer)
    catalog = load_catalog(made / "catalog.json", layout)
    maker = example_maker(PromptBuilder(tokenizer, layout, catalog), layout, catalog, max_history=10)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    sequences = [[0, 1, 2], [3, 4, 5, 6, 7]]
    alone = []
    with torch.no_grad():
        found = loss_of(model, maker.collate(sequences)).item()
        for sequence in sequences:
            ids, counts = maker.encode(sequence)
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            alone += [-float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids)) if counts[i]]
    assert found == pytest.approx(sum(alone) / len(alone), rel=1e-5)


def test_the_schedule_rises_and_falls() -> None:
    config = TrainingConfig(steps=100, warmup_steps=10)
    rates = [schedule(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[-1] < 0.001


def test_an_unknown_item_is_an_error(made: Path, tmp_path: Path) -> None:
    catalog = load_catalog(made / "catalog.json", None)
    with pytest.raises(CatalogError, match="no item 'nothing'"):
        make_checkpoint(
            catalog, [History("u", ("P0001", "nothing"))], tmp_path, seed=0, config=SMALL_CONFIG, console=QUIET
        )


def test_codebooks_that_are_too_small_are_an_error(made: Path, tmp_path: Path) -> None:
    catalog = load_catalog(made / "catalog.json", None)
    small = replace(SMALL_CONFIG, sid_sizes=(4, 6, 2))
    with pytest.raises(CatalogError, match="do not fit codebooks"):
        make_checkpoint(catalog, [], tmp_path, seed=0, config=small, console=QUIET)
