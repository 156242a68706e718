"""The bundled checkpoint: a synthetic shop, a model trained on it, and how close it comes to the optimum."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from flashrec.sid import load_catalog
from flashrec_harness.checkpoints.build import CheckpointConfig, make_checkpoint
from flashrec_harness.checkpoints.config import write_json
from flashrec_harness.checkpoints.margins import history_prompts, margins
from flashrec_harness.checkpoints.sequences import History, hold_out
from flashrec_harness.checkpoints.shop import Shop

TRAINING_USERS = 60_000
TEST_USERS = 1_000
MARGIN_PROMPTS = 100


def make_shop(
    out: Path,
    *,
    seed: int = 0,
    shop: Shop | None = None,
    users: int = TRAINING_USERS,
    test_users: int = TEST_USERS,
    margin_prompts: int = MARGIN_PROMPTS,
    config: CheckpointConfig | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Sample users, train on ``users`` of them, and add the optimum and the margins to ``training.json``.

    ``optimum``: ``HR@10 expected`` is the mean probability that the best ten SIDs hold the next purchase,
    ``HR@10`` how often they did hold the test rows' targets.
    """
    shop = shop or Shop(seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    write_shop_items(shop, out / "items.tsv")
    sizes = shop.config.codebook_sizes
    held_out = hold_out(_renamed(shop.sample(test_users, seed=seed + 2), "T"))
    report = make_checkpoint(
        load_catalog(out / "items.tsv", None, sid_sizes=sizes),
        shop.sample(users, seed=seed + 1),
        out,
        seed=seed,
        held_out=held_out,
        config=replace(config or CheckpointConfig(), sid_sizes=sizes),
        console=console,
    )
    report["optimum"] = optimum(shop, held_out)
    prompts = history_prompts(out, [row.items for row in held_out[:margin_prompts]])
    report["margins"] = [found.as_dict() for found in margins(out, prompts)]
    write_json(out / "training.json", report)
    return report


def optimum(shop: Shop, held_out: Sequence[History], k: int = 10) -> dict[str, float]:
    """The generator's own HR@k on test rows: expected, and as drawn."""
    probs = np.stack([shop.next_sid_probs(row.items) for row in held_out])
    targets = np.array([shop.items[row.target] for row in held_out if row.target is not None])
    best = np.argsort(-probs, axis=1, kind="stable")[:, :k]
    return {
        f"HR@{k} expected": float(np.take_along_axis(probs, best, 1).sum(1).mean()),
        f"HR@{k}": float((best == targets[:, None]).any(1).mean()),
    }


def write_shop_items(shop: Shop, path: Path) -> None:
    """The shop's items as a catalog table with codes and titles."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["item_id", "code_0", "code_1", "code_2", "title"])
        for item, row in shop.items.items():
            writer.writerow([item, *shop.sids[row].tolist(), shop.titles[item]])


def _renamed(histories: Sequence[History], prefix: str) -> list[History]:
    return [replace(history, user=prefix + history.user[1:]) for history in histories]
