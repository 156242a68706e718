"""From a catalog and histories to a trained checkpoint directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from flashrec.console import make_console
from flashrec.errors import CatalogError
from flashrec.sid import Catalog, SidLayout, build_trie, infer_layout
from flashrec_harness import quality
from flashrec_harness.checkpoints.config import ModelConfig, TrainingConfig, write_json, write_model
from flashrec_harness.checkpoints.examples import ExampleMaker, Frame, Ints
from flashrec_harness.checkpoints.files import write_catalog, write_items
from flashrec_harness.checkpoints.ranking import CatalogRanker
from flashrec_harness.checkpoints.sequences import (
    History,
    assert_no_leak,
    drop_held_out,
    join_windows,
    write_histories,
)
from flashrec_harness.checkpoints.tokenizer import CHAT_END, PAD, build_tokenizer, save_tokenizer
from flashrec_harness.checkpoints.training import STATE_FILE, Log, train
from flashrec_harness.prompts import TEMPLATE_TEXTS, PromptBuilder

EVALUATION_BEAMS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Everything that decides a trained checkpoint, beside its data and the seed.

    ``sid_sizes``: codes per level; by default the largest code of the catalog plus one.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    sid_sizes: tuple[int, ...] | None = None
    text_vocab: int = 512


def make_checkpoint(
    catalog: Catalog,
    sequences: Sequence[History],
    out: Path,
    *,
    seed: int,
    held_out: Sequence[History] = (),
    config: CheckpointConfig | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a Qwen3 on ``sequences`` and write a checkpoint directory; returns what ``training.json`` holds.

    Windows of one user are joined, every transition that is a row of ``held_out`` is cut, and what remains is
    asserted free of them. Weights are rounded to bf16 before they are judged on ``held_out``. An interrupted
    run resumes from ``out/training_state.pt``. Raises :class:`CatalogError` for items that the catalog lacks.
    """
    config = config or CheckpointConfig()
    console = console or make_console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    training = drop_held_out(join_windows(sequences), held_out)
    assert_no_leak(training, held_out)
    builder, layout = _prepare_tokenizer(catalog, out, config)
    rows = [encode_rows(history.items, builder) for history in training if len(history.items) > 1]
    model, log = _train(builder, layout, catalog, rows, out, config, seed, console)
    write_model(model, out, eos_token_id=builder.tokenizer.convert_tokens_to_ids(CHAT_END))
    write_catalog(catalog, out / "catalog.json")
    write_items(catalog, layout, out / "items.tsv")
    report = {
        "seed": seed,
        "settings": asdict(config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "codebooks": layout.sizes,
        "held_out": len(held_out),
        "training": {
            "sequences": len(rows),
            "items": sum(map(len, rows)),
            "seconds": round(log.seconds, 1),
            "device": f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}",
            "date": date.today().isoformat(),
            "final_loss": round(float(np.mean(log.losses[-50:])), 4),
        },
    }
    if held_out:
        write_histories(out / "test.csv", held_out)
        report["quality"] = judge(model, builder, layout, catalog, rows, held_out)
    write_json(out / "training.json", report)
    (out / STATE_FILE).unlink(missing_ok=True)
    return report


def encode_rows(items: Sequence[str], builder: PromptBuilder) -> Ints:
    """Catalog rows of item ids. Raises :class:`CatalogError` for an unknown one."""
    return np.array([builder.rank(item) for item in items], dtype=np.int64)


def judge(
    model: Any,
    builder: PromptBuilder,
    layout: SidLayout,
    catalog: Catalog,
    training: Sequence[Ints],
    held_out: Sequence[History],
) -> dict[str, dict[str, float]]:
    """HR@k and NDCG@k on ``held_out``: the model's (trie on, score space ``sid``) and the baselines'."""
    targets = [builder.rank(row.target) for row in held_out if row.target is not None]
    ranker = CatalogRanker(model, layout, build_trie(catalog.sids, layout.sizes))
    prompts = builder.prompts([row.items for row in held_out])
    rankings = [ranking.leaves for ranking in ranker.rank(prompts, EVALUATION_BEAMS)]
    out = {"model": quality.metrics(rankings, targets)}
    histories = [encode_rows(row.items, builder).tolist() for row in held_out]
    sequences = [sequence.tolist() for sequence in training]
    for name, fit in quality.BASELINES.items():
        recommend = fit(sequences)
        out[name] = quality.metrics([recommend(h, EVALUATION_BEAMS) for h in histories], targets)
    return out


def _prepare_tokenizer(catalog: Catalog, out: Path, config: CheckpointConfig) -> tuple[PromptBuilder, SidLayout]:
    """Write the tokenizer, and read it back as every later user will."""
    sizes = config.sid_sizes or tuple(int(size) + 1 for size in catalog.sids.max(0))
    if len(sizes) != catalog.depth or np.any(catalog.sids >= np.array(sizes)):
        raise CatalogError(f"{catalog.path}: codes do not fit codebooks of {sizes}; give larger sid_sizes")
    titles = list(catalog.titles or ())
    corpus = [*titles, *(TEMPLATE_TEXTS * max(len(titles) // 4, 1))]
    tokenizer = build_tokenizer(corpus, sizes, text_vocab=config.text_vocab)
    save_tokenizer(tokenizer, out, max_length=config.model.max_position_embeddings)
    loaded = PreTrainedTokenizerFast.from_pretrained(out)
    layout = infer_layout(loaded, depth=catalog.depth)
    return PromptBuilder(loaded, layout, catalog), layout


def _train(
    builder: PromptBuilder,
    layout: SidLayout,
    catalog: Catalog,
    rows: Sequence[Ints],
    out: Path,
    config: CheckpointConfig,
    seed: int,
    console: Console,
) -> tuple[Any, Log]:
    """The trained model with weights rounded to bf16 (held in float32), and its losses."""
    maker = example_maker(builder, layout, catalog, config.training.max_history)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config.model.qwen3(len(builder.tokenizer)))
    log = train(
        model,
        rows,
        maker,
        config.training,
        seed=seed,
        out=out,
        fingerprint=_fingerprint(catalog, rows, config, seed),
        console=console,
    )
    return model.to(torch.bfloat16).to(torch.float32), log


def example_maker(builder: PromptBuilder, layout: SidLayout, catalog: Catalog, max_history: int) -> ExampleMaker:
    """The examples of a checkpoint: its prompt frame and the wrapped tokens of each catalog row."""
    if layout.begin is None or layout.end is None:
        raise CatalogError("training needs a layout with begin and end tokens")
    tokens = np.array([(layout.begin, *layout.token_ids(sid), layout.end) for sid in catalog.sids.tolist()])
    prompt = builder.prompt([catalog.items_of(0)[0]])
    start = prompt.index(layout.begin)
    eos = builder.tokenizer.convert_tokens_to_ids(CHAT_END)
    frame = Frame(prompt[:start], prompt[start + tokens.shape[1] :], eos)
    pad = builder.tokenizer.convert_tokens_to_ids(PAD)
    return ExampleMaker(tokens, frame, pad=pad, max_history=max_history)


def _fingerprint(catalog: Catalog, rows: Sequence[Ints], config: CheckpointConfig, seed: int) -> str:
    digest = hashlib.sha256(json.dumps([asdict(config), seed, catalog.digest, len(rows)]).encode())
    for row in rows:
        digest.update(row.tobytes() + b"\n")
    return digest.hexdigest()
