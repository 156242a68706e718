"""A shop of a few items and a model of a few thousand parameters, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from flashrec_harness.checkpoints.build import CheckpointConfig
from flashrec_harness.checkpoints.config import ModelConfig, TrainingConfig
from flashrec_harness.checkpoints.make_shop import make_shop
from flashrec_harness.checkpoints.shop import Shop, ShopConfig

QUIET = Console(quiet=True)
SMALL_SHOP = ShopConfig(
    codebook_sizes=(4, 6, 8),
    departments=3,
    series_per_department=(2, 4),
    items_per_series=(1, 5),
    shared_sid_share=0.2,
    interests=3,
)
SMALL_CONFIG = CheckpointConfig(
    model=ModelConfig(hidden_size=32, intermediate_size=64, max_position_embeddings=256),
    training=TrainingConfig(steps=6, batch_size=8, warmup_steps=2, dropout=0.1, save_every=2),
    text_vocab=300,
)


def small_shop(out: Path, *, config: CheckpointConfig = SMALL_CONFIG, seed: int = 5) -> dict[str, Any]:
    """Make a checkpoint of the small shop in ``out``."""
    shop = Shop(SMALL_SHOP, seed=seed)
    return make_shop(out, seed=seed, shop=shop, users=40, test_users=12, margin_prompts=1, config=config, console=QUIET)
