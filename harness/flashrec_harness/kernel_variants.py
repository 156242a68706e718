"""Shows that nothing is compiled while serving: passes of many lengths ask for one variant of a kernel each.

Triton compiles anew for an integer that is 1 or a multiple of 16 and for a pointer to 16 bytes, where a parameter is
not exempt, and the wave waits. What follows from the checkpoint may do that, what follows from a request may not.
Nothing is compiled here: see :mod:`.hopper`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from flashrec.attention.base import PrefillMeta
from flashrec.attention.paged import TALL_CONTEXT, PagedAttention
from flashrec.kernels.gemm import linear_fp8_triton, linear_triton
from flashrec.kernels.gemm_gluon import linear_fp8_gluon
from flashrec.kernels.ops import by_tile_height
from flashrec.kernels.prefill_attention import paged_prefill_attention_triton
from flashrec.kernels.prefill_attention_gluon import paged_prefill_attention_gluon
from flashrec.kernels.qk_norm_rope_store import qk_norm_rope_store_triton
from flashrec.kernels.registry import TRITON
from flashrec.kernels.trie_expand import Children, Hypotheses, LeafLists
from flashrec.kernels.trie_expand_triton import trie_expand_triton
from flashrec.kvcache.pool import KVPool
from flashrec.transfer import upload
from flashrec_harness import hopper
from flashrec_harness.children import ChildError
from flashrec_harness.outcome import Check, Outcome

TITLE = "no length makes a kernel compile anew"
SHAPES = {
    "gemm._gemm_kernel": 10,  # bf16 and FP8, each in tiles of five kinds: the start of the engine compiles them
    "gemm_gluon._gemm_kernel": 5,
    "prefill_attention._prefill_kernel": 1,
    "prefill_attention_gluon._prefill_kernel": 1,
    "qk_norm_rope_store._qk_norm_rope_store_kernel": 1,
    "trie_score_triton.score_kernel": 1,
}
"""The kernels that are told what follows from requests, and the sets of compile-time constants that they may ask for;
of others one."""
_Q_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN, _PAGE = 16, 8, 128, 2048, 64
_COUNTS = (1, 2, 3, 4, 15, 16, 17, 31, 32, 48, 63, 64)
_PASSES = (
    *((tokens,) for tokens in (1040, 1041, 1042, 1043, 1056, 1088, 4097, 4160, 5000, 8191)),
    *((TALL_CONTEXT + 64,) * requests for requests in (2, 3, 4)),
    *((303,) * requests for requests in (4, 5, 7, 16, 17)),
)
"""Prompt lengths of a pass: of few tiles and many, of whole pages and broken ones."""


@dataclass(frozen=True, slots=True)
class Variants:
    """Of one kernel: launches, shapes (sets of compile-time constants) that they ask for, and variants of those."""

    kernel: str
    launches: int
    shapes: int
    variants: int


def count() -> list[Variants]:
    """Launches the kernels whose arguments follow from requests; for a process with ``TRITON_INTERPRET=0``."""
    asked: dict[str, list[tuple[str, str]]] = defaultdict(list)

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = self.device_caches[0][-1]
        _, specialization, options = binder(*args, **kwargs)
        constants = [item for param, item in zip(self.params, specialization, strict=True) if param.is_constexpr]
        asked[f"{self.__module__.rpartition('.')[2]}.{self.__name__}"].append(
            (repr((constants, options)), repr((specialization, options)))
        )

    hopper.instead_of_launching(lambda launch: note)
    for launch in (_prefill_passes, _stores, _products, _filters):
        launch()
    return [
        Variants(name, len(pairs), len({shape for shape, _ in pairs}), len({variant for _, variant in pairs}))
        for name, pairs in sorted(asked.items())
    ]


def _cache() -> KVPool:
    return KVPool.allocate(
        num_layers=1,
        num_kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        num_pages=2,
        page_size=_PAGE,
        beam_slots=_PAGE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


def _prefill_passes() -> None:
    """Attention of uncaptured passes, planned as the engine plans them, in short tiles and in tall ones."""
    kernels: Callable[..., torch.Tensor] = by_tile_height(paged_prefill_attention_gluon, paged_prefill_attention_triton)
    for tall in (False, True):
        ops: Any = SimpleNamespace(
            chosen={"shared_prefix_attention": TRITON}, tall_tiles=tall, paged_prefill_attention=kernels
        )
        attention = PagedAttention(_cache(), _Q_HEADS, ops)
        for lengths in _PASSES:
            pages = -(-max(lengths) // _PAGE)
            meta = PrefillMeta(
                query_lens=lengths,
                kv_lens=lengths,
                page_table=np.zeros((len(lengths), pages), dtype=np.int32),
                positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
                ends=np.cumsum(lengths) - 1,
            )
            attention.prefill(meta)(torch.empty(sum(lengths), _Q_HEADS, _HEAD_DIM, dtype=torch.bfloat16), 0)
            attention.prefill_ends(meta)(torch.empty(len(lengths), _Q_HEADS, _HEAD_DIM, dtype=torch.bfloat16), 0)


def _stores() -> None:
    """Keys and values of so many tokens."""
    cache, width = _cache(), (_Q_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
    gain, angles = torch.empty(_HEAD_DIM), torch.empty(16, _HEAD_DIM)
    for tokens in _COUNTS:
        _, positions, slots = upload(np.zeros((3, tokens), dtype=np.int32), torch.device("cpu"))
        qkv = torch.empty(tokens, width, dtype=torch.bfloat16)
        k, v, heads = cache.k[0], cache.v[0], (_Q_HEADS, _KV_HEADS, _HEAD_DIM)
        qk_norm_rope_store_triton(qkv, positions, slots, gain, gain, 1e-6, angles, k, v, 1.0, 1.0, *heads)


def _products() -> None:
    """The last tokens' products of so many prompts."""
    weight, channel = torch.empty(_HIDDEN, _HIDDEN), torch.empty(_HIDDEN)
    for rows in (*_COUNTS, 65, 100, 128, 200, 256, 500, 512, 1000, 1024):
        x = torch.empty(rows, _HIDDEN)
        linear_triton(x.bfloat16(), weight.bfloat16())
        codes = (x.to(torch.float8_e4m3fn), torch.empty(rows, 1), weight.to(torch.float8_e4m3fn), channel)
        linear_fp8_triton(*codes, torch.bfloat16)
        linear_fp8_gluon(*codes, torch.bfloat16)


def _filters() -> None:
    """A step of a search with lists of so many SIDs."""
    size, width = 64, 8
    table = torch.arange(size, dtype=torch.int32)[None]
    codes = torch.arange(size, dtype=torch.int32)
    children = Children(codes, codes, None, None, table, None, size, normalise_legal=False)
    rows = Hypotheses(
        torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.ones(1, dtype=torch.bool), torch.zeros(1).long()
    )
    spans = torch.tensor([[0], [1], [0], [width]], dtype=torch.int32)
    on = torch.ones(1, dtype=torch.bool)
    for listed in _COUNTS:
        lists = LeafLists(torch.arange(listed), 1 << 40, on, ~on)
        trie_expand_triton(torch.empty(1, size), children, rows, spans, 1, width, lists)


def check() -> Check:
    """Runs :func:`count` in a child process; fails where there are more variants than shapes."""
    try:
        rows = hopper.rows_of("-m", __name__)
    except ChildError as error:
        return Check("kernel", TITLE, Outcome.FAIL, "the kernels could not be asked for", reason=str(error)[:400])
    return judged([Variants(**row) for row in rows])


def judged(found: list[Variants]) -> Check:
    """Fails where a kernel has more variants than shapes or more shapes than it may, or was not launched."""
    reasons = [f"{name} was not launched" for name in SHAPES if name not in {one.kernel for one in found}]
    for one in found:
        if one.shapes > SHAPES.get(one.kernel, 1):
            reasons.append(f"{one.kernel}: {one.shapes} shapes: a compile-time constant follows from a length")
        if one.variants > one.shapes:
            reasons.append(
                f"{one.kernel}: {one.variants} variants of {one.shapes} shapes: name what varies in the kernel's "
                "decorator (varying=...)"
            )
    return Check(
        "kernel",
        TITLE,
        Outcome.FAIL if reasons else Outcome.PASS,
        f"{sum(one.launches for one in found)} launches of {len(found)} kernels, "
        f"{sum(one.variants for one in found)} variants of {sum(one.shapes for one in found)} shapes",
        reason="; ".join(reasons),
        rows=[asdict(one) for one in found],
        repeat="flashrec-harness kernel",
    )


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in count()]))
