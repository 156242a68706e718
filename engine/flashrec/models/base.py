"""What the runtime asks of a model, whatever its architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypedDict

import torch

from flashrec.batch import ForwardBatch
from flashrec.kvcache.pool import KVPool
from flashrec.layers.rotary import RopeRung
from flashrec.layers.weight import WeightTarget
from flashrec.models.config import ModelConfig, RawConfig


class Placement(TypedDict):
    """Keyword arguments that every layer's constructor takes."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to build a model: types, and which fused kernels it may use (SPEC M7)."""

    dtype: torch.dtype
    device: torch.device
    fp8: bool
    fused_rms_fp8: bool
    fused_silu_fp8: bool
    rope_rung: RopeRung


class CausalLM(ABC):
    """A decoder whose keys and values live in a shared pool."""

    config: ModelConfig

    @classmethod
    @abstractmethod
    def parse_config(cls, raw: RawConfig, model_path: Path) -> ModelConfig:
        """Read the checkpoint's dimensions; raise :class:`UnsupportedModelError` for what is not implemented."""

    @classmethod
    @abstractmethod
    def build(cls, config: ModelConfig, options: ModelOptions, pool: KVPool, max_position: int) -> Self:
        """Allocate an unfilled model whose rotary table covers ``max_position`` positions."""

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """From token ids [T] to ``(hidden, residual)`` before the final norm: [T, H], or [E, H] of ``batch.ends``."""

    @abstractmethod
    def final_norm(self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The head's input [T, H]; called on the rows whose logits are wanted."""

    @abstractmethod
    def lm_head(self) -> torch.Tensor:
        """The head's weight [vocab, H]: the embedding where they are tied (SPEC M9)."""

    @abstractmethod
    def targets(self) -> Iterator[WeightTarget]:
        """Every tensor that the checkpoint must hold."""
