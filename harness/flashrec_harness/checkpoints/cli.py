"""``flashrec-harness make-checkpoint``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flashrec.console import make_console
from flashrec.errors import ConfigError
from flashrec.sid import load_catalog
from flashrec_harness.checkpoints.card import COLUMNS, write_card
from flashrec_harness.checkpoints.config import ModelConfig, TrainingConfig
from flashrec_harness.checkpoints.sequences import History, read_histories
from flashrec_harness.checkpoints.shapes import SHAPES, make_shape

if TYPE_CHECKING:
    from flashrec_harness.checkpoints.build import CheckpointConfig

_MODEL, _TRAINING = ModelConfig(), TrainingConfig()


def command(
    out: Annotated[Path, typer.Option("--out", help="Directory to write; an interrupted run resumes there.")],
    catalog: Annotated[
        Path | None, typer.Option("--catalog", help="Items and their semantic IDs, any catalog format.")
    ] = None,
    sequences: Annotated[
        list[Path] | None,
        typer.Option("--sequences", help="CSV: user_id, history_item_ids, and maybe target_item_id. May repeat."),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option("--held-out", help="CSV of test rows: cut out of the training data, then used to judge."),
    ] = None,
    histories_only: Annotated[
        bool, typer.Option("--histories-only", help="Do not train on the target_item_id of --sequences.")
    ] = False,
    shop: Annotated[bool, typer.Option("--shop", help="The synthetic shop: makes the bundled checkpoint.")] = False,
    shape: Annotated[str | None, typer.Option("--shape", help=f"Random weights instead: {', '.join(SHAPES)}.")] = None,
    catalog_sids: Annotated[
        int | None, typer.Option("--catalog-sids", min=1, help="With --shape: add a catalog of so many SIDs.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides weights, batches and dropout.")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimiser steps.")] = _TRAINING.steps,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = _TRAINING.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = _TRAINING.learning_rate,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = _TRAINING.weight_decay,
    dropout: Annotated[float, typer.Option(min=0, max=0.9, help="For small data.")] = _TRAINING.dropout,
    shuffle_history: Annotated[
        float, typer.Option(min=0, max=1, help="Share of histories whose order is forgotten.")
    ] = _TRAINING.shuffle_history,
    hidden_size: Annotated[int, typer.Option(min=16, help="A multiple of 16.")] = _MODEL.hidden_size,
    layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = _MODEL.num_hidden_layers,
) -> None:
    """Make a checkpoint: trained on --catalog and --sequences, the bundled --shop, or random of a --shape."""
    console = make_console(stderr=True)
    modes = {"--catalog": catalog is not None, "--shop": shop, "--shape": shape is not None}
    if sum(modes.values()) != 1:
        raise ConfigError(f"make-checkpoint: give exactly one of {', '.join(modes)}")
    if catalog_sids is not None and shape is None:
        raise ConfigError("--catalog-sids: only with --shape; --catalog and --shop bring a catalog of their own")
    if shape is not None:
        make_shape(shape, out, seed, catalog_sids=catalog_sids, console=console)
        return
    # Every command of the harness imports this module; transformers alone would double its start.
    from flashrec_harness.checkpoints.build import CheckpointConfig, make_checkpoint
    from flashrec_harness.checkpoints.make_shop import make_shop

    training = replace(
        _TRAINING,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        dropout=dropout,
        shuffle_history=shuffle_history,
    )
    model = replace(_MODEL, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=layers)
    config = CheckpointConfig(model=model, training=training)
    if catalog is None:
        source = ["--shop"]
        report = make_shop(out, seed=seed, config=config, console=console)
    else:
        source = _source(catalog, sequences or [], held_out, histories_only)
        report = make_checkpoint(
            load_catalog(catalog, None),
            [h for path in sequences or [] for h in training_histories(path, histories_only)],
            out,
            seed=seed,
            held_out=read_histories(held_out) if held_out else (),
            config=config,
            console=console,
        )
    write_card(report, recipe(source, config, seed), out)
    show(report, out, make_console())


def training_histories(path: Path, histories_only: bool) -> list[History]:
    """Sequences to train on: histories, with their targets at the end unless ``histories_only``."""
    rows = read_histories(path)
    if histories_only:
        return [History(row.user, row.items) for row in rows]
    return [History(row.user, row.items if row.target is None else (*row.items, row.target)) for row in rows]


def recipe(source: Sequence[str], config: CheckpointConfig, seed: int) -> str:
    """The command that makes a checkpoint again: ``source`` options and every setting that is not a default."""
    chosen = {
        "--hidden-size": (config.model.hidden_size, _MODEL.hidden_size),
        "--layers": (config.model.num_hidden_layers, _MODEL.num_hidden_layers),
        "--steps": (config.training.steps, _TRAINING.steps),
        "--batch-size": (config.training.batch_size, _TRAINING.batch_size),
        "--learning-rate": (config.training.learning_rate, _TRAINING.learning_rate),
        "--weight-decay": (config.training.weight_decay, _TRAINING.weight_decay),
        "--dropout": (config.training.dropout, _TRAINING.dropout),
        "--shuffle-history": (config.training.shuffle_history, _TRAINING.shuffle_history),
        "--seed": (seed, 0),
    }
    settings = [word for flag, (value, usual) in chosen.items() if value != usual for word in (flag, str(value))]
    return shlex.join(["flashrec-harness", "make-checkpoint", *source, *settings, "--out", "DIR"])


def _source(catalog: Path, sequences: Sequence[Path], held_out: Path | None, histories_only: bool) -> list[str]:
    """The options that name the data, by file name."""
    if not sequences:
        raise ConfigError("--sequences: needed with --catalog")
    options = ["--catalog", catalog.name]
    for path in sequences:
        options += ["--sequences", path.name]
    if histories_only:
        options.append("--histories-only")
    return options if held_out is None else [*options, "--held-out", held_out.name]


def show(report: dict[str, Any], out: Path, console: Console) -> None:
    """Print what was trained, how it compares with the baselines and the optimum, and its margins."""
    training = report["training"]
    console.print(
        f"{out}: {report['parameters']:,} parameters, {training['sequences']:,} sequences, "
        f"{training['seconds']:.0f} s, final loss {training['final_loss']:.3f} nats per token"
    )
    table = Table(f"{report['held_out']} held-out rows", *COLUMNS)
    for name, figures in report.get("quality", {}).items():
        table.add_row(name, *(f"{figures[column]:.4f}" for column in COLUMNS))
    if table.row_count:
        console.print(table)
    for name, value in report.get("optimum", {}).items():
        console.print(f"the generator's own {name}: {value:.4f}")
    for found in report.get("margins", []):
        console.print(
            f"margins, score space {found['space']}: median gap {found['median_gap']:.4f}, "
            f"{100 * found['small_share']:.2f} % below 1e-4 ({found['prompts']} prompts)"
        )
