"""The training loop: seeded, resumable, with a progress bar."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import functional as F

from flashrec.errors import CheckpointError
from flashrec_harness.checkpoints.config import TrainingConfig
from flashrec_harness.checkpoints.examples import Batch, ExampleMaker, Ints, epoch_batches

STATE_FILE = "training_state.pt"


@dataclass(slots=True)
class Log:
    """The loss of every step so far, in nats per token, and the seconds they took, interruptions left out."""

    losses: list[float]
    seconds: float = 0.0


def train(
    model: Any,
    sequences: Sequence[Ints],
    maker: ExampleMaker,
    config: TrainingConfig,
    *,
    seed: int,
    out: Path,
    fingerprint: str,
    console: Console,
    stop_after: int | None = None,
) -> Log:
    """Train ``model`` (a ``Qwen3ForCausalLM``, float32) in place.

    The state is saved to ``out/training_state.pt`` every ``save_every`` steps. A run that finds a state resumes
    from it and ends with the same bits as one that was never stopped: batches and dropout masks depend on
    ``(seed, step)`` alone. ``fingerprint`` names data and settings; a state with another raises
    :class:`CheckpointError`. ``stop_after`` ends early after that step, with the state saved.
    """
    optimizer = torch.optim.AdamW(_groups(model, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.98))
    state = out / STATE_FILE
    log = _restore(state, model, optimizer, fingerprint)
    batches = itertools.islice(_batches(sequences, maker, config, seed), len(log.losses), None)
    handles = _add_dropout(model, config.dropout)
    model.train()
    with torch.random.fork_rng(devices=[]), _progress(console) as progress:
        bar = progress.add_task("training", total=config.steps, completed=len(log.losses), loss=float("nan"))
        for step in range(len(log.losses), config.steps if stop_after is None else stop_after):
            started = time.perf_counter()
            torch.manual_seed(seed * 1_000_003 + step)
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * schedule(step, config)
            log.losses.append(_step(model, optimizer, next(batches), config.label_smoothing))
            log.seconds += time.perf_counter() - started
            progress.update(bar, advance=1, loss=sum(log.losses[-50:]) / len(log.losses[-50:]))
            if (step + 1) % config.save_every == 0 or step + 1 == stop_after:
                _save(state, model, optimizer, fingerprint, log)
    for handle in handles:
        handle.remove()
    model.eval()
    return log


def schedule(step: int, config: TrainingConfig) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine to zero."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * done))


def loss_of(model: Any, batch: Batch, label_smoothing: float = 0.0) -> torch.Tensor:
    """Mean cross-entropy over the targets that count, in nats per token. Heads run for those positions only."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    counts = batch.targets != -100
    logits = model.lm_head(hidden[counts])
    return F.cross_entropy(logits, batch.targets[counts], label_smoothing=label_smoothing)


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, label_smoothing: float) -> float:
    loss = loss_of(model, batch, label_smoothing)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _batches(sequences: Sequence[Ints], maker: ExampleMaker, config: TrainingConfig, seed: int) -> Iterator[Batch]:
    for epoch in itertools.count():
        yield from epoch_batches(
            sequences,
            maker,
            batch_size=config.batch_size,
            shuffle_history=config.shuffle_history,
            seed=seed,
            epoch=epoch,
        )


def _groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def _add_dropout(model: Any, rate: float) -> list[Any]:
    """Qwen3 has dropout in the attention weights only, which does little for small data."""
    if rate == 0:
        return []

    def drop(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, rate, module.training)

    places = [model.model.embed_tokens]
    for layer in model.model.layers:
        places += [layer.self_attn.o_proj, layer.mlp.down_proj]
    return [place.register_forward_hook(drop) for place in places]


def _restore(path: Path, model: Any, optimizer: torch.optim.Optimizer, fingerprint: str) -> Log:
    if not path.exists():
        return Log([])
    state = torch.load(path, weights_only=True)
    if state["fingerprint"] != fingerprint:
        raise CheckpointError(f"{path}: from other data or settings; delete it, or choose another --out")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Log(state["losses"], state["seconds"])


def _save(path: Path, model: Any, optimizer: torch.optim.Optimizer, fingerprint: str, log: Log) -> None:
    temporary = path.with_suffix(".tmp")
    state = {
        "fingerprint": fingerprint,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        **asdict(log),
    }
    torch.save(state, temporary)
    os.replace(temporary, path)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
        console=console,
    )
