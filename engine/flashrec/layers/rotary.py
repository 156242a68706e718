"""Rotary position embedding, and the step from a fused QKV product to queries and stored keys and values."""

from __future__ import annotations

from enum import StrEnum

import torch

from flashrec.batch import ForwardBatch
from flashrec.kernels.qk_norm_rope_store import rotate, store_rows
from flashrec.kernels.rms_norm import rms_norm
from flashrec.kvcache.pool import KVPool


class RopeRung(StrEnum):
    """How QK-norm, RoPE and the K/V store run: all in one kernel, the norm apart, or plain PyTorch."""

    FUSED = "fused"
    ROPE_STORE = "rope_store"
    PLAIN = "plain"


def rope_table(head_dim: int, theta: float, max_position: int, device: torch.device) -> torch.Tensor:
    """Cosines then sines of every position, float32 [max_position, head_dim] (Su et al. 2021, half-split)."""
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    angles = torch.outer(torch.arange(max_position).float(), inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


class RotaryStore:
    """Normalises Q and K, rotates them and writes K and V to the pool, once (SPEC M7, M8)."""

    def __init__(
        self, pool: KVPool, table: torch.Tensor, num_heads: int, eps: float, rung: RopeRung = RopeRung.FUSED
    ) -> None:
        self.pool = pool
        self.table = table
        self.num_heads = num_heads
        self.eps = eps
        self.rung = rung

    def __call__(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        layer: int,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """From [T, (heads + 2 kv_heads) * d] to contiguous queries [T, heads, d]."""
        if self.rung is RopeRung.FUSED:
            return self._rope_store(qkv, q_weight, k_weight, layer, batch)
        if q_weight is not None and k_weight is not None:
            qkv = self._norm_heads(qkv, q_weight, k_weight)
        if self.rung is RopeRung.ROPE_STORE:
            return self._rope_store(qkv, None, None, layer, batch)
        return self._plain(qkv, layer, batch)

    def _rope_store(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        layer: int,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        pool = self.pool
        q: torch.Tensor = batch.ops.qk_norm_rope_store(
            qkv,
            batch.positions,
            batch.slots,
            q_weight,
            k_weight,
            self.eps,
            self.table,
            pool.k[layer],
            pool.v[layer],
            pool.k_scale[layer],
            pool.v_scale[layer],
            self.num_heads,
            pool.num_kv_heads,
            pool.head_dim,
        )
        return q

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = self.num_heads, self.pool.num_kv_heads, self.pool.num_kv_heads
        q, k, v = qkv.view(qkv.shape[0], -1, self.pool.head_dim).split(heads, dim=1)
        return q, k, v

    def _norm_heads(self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(qkv)
        parts = rms_norm(q, q_weight, self.eps), rms_norm(k, k_weight, self.eps), v
        return torch.cat(parts, dim=1).flatten(1)

    def _plain(self, qkv: torch.Tensor, layer: int, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self._split(qkv)
        pool = self.pool
        store_rows(pool.k[layer], batch.slots, rotate(k, self.table, batch.positions), pool.k_scale[layer])
        store_rows(pool.v[layer], batch.slots, v, pool.v_scale[layer])
        return rotate(q, self.table, batch.positions)
