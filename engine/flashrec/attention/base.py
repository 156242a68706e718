"""The two attention shapes of a wave, and what a backend must provide for them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.batch import Activation, Attend
from flashrec.kernels.decode_work import DecodeWork
from flashrec.kvcache.pool import KVPool
from flashrec.transfer import StaticBlock


@dataclass(frozen=True, slots=True, eq=False)
class PrefillMeta:
    """A ragged causal pass over T prompt tokens, on the host; a token sees its request's positions up to its own.

    Per request of the pass: ``query_lens``, its tokens in the pass; ``kv_lens``, its positions that are in the
    pool once they are stored; ``page_table`` int32 [requests, pages], the pages that hold its keys, padded with the
    scratch page. ``positions`` int32 [T]. ``ends`` int32 [E] are the tokens that end a prompt: the last of their
    request, in the order of the requests.
    """

    query_lens: Sequence[int]
    kv_lens: Sequence[int]
    page_table: NDArray[np.int32]
    positions: NDArray[np.int32]
    ends: NDArray[np.int32]

    @property
    def end_lens(self) -> list[int]:
        """How many of each request's tokens are among ``ends``: one or none."""
        ends = set(self.ends.tolist())
        return [int(after - 1 in ends) for after in itertools.accumulate(self.query_lens)]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeMeta:
    """A decode pass: every row sees its request's context and its own beam's tokens.

    ``page_table`` int32 [R, pages]; ``context_len`` int32 [R]; ``work`` cuts the rows; ``ancestors`` int32
    [passes, B], the row that held a row's beam at each pass. The beam's token of pass j lives in pool slot
    ``beam_base + j * B + ancestors[j, row]``; ``stored`` of them are there, this pass's own among them.
    """

    page_table: torch.Tensor
    context_len: torch.Tensor
    work: DecodeWork
    ancestors: torch.Tensor
    stored: int

    @property
    def rows(self) -> int:
        """The bucket's rows B."""
        return self.ancestors.shape[1]


class StaticPrefill(ABC):
    """Attention inside a captured prefill: :meth:`attend` is captured once, :meth:`plan` precedes each replay.

    ``fields`` are its part of the pass's static block, int32, named neither ``tokens`` nor ``ends``. They share a block
    with those, since each further write is 0.15 ms of the host that a small pass waits for (H200, 2026-12-01).
    """

    fields: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def attach(self, block: StaticBlock, positions: torch.Tensor) -> None:
        """Read the fields from ``block`` from now on, and the static ``positions`` int32 [tokens] of the pass; before
        anything is captured."""

    @abstractmethod
    def plan(self, meta: PrefillMeta) -> Mapping[str, NDArray[np.integer]]:
        """Plan a pass; returns what to write to the fields, whose other entries become 0, before its replay.

        Tokens beyond the pass's are inert.
        """

    @abstractmethod
    def attend(self, q: torch.Tensor, layer: int) -> Activation:
        """See :class:`~flashrec.batch.Attend`."""

    @abstractmethod
    def attend_ends(self, q: torch.Tensor, layer: int) -> Activation:
        """:meth:`attend` for the queries of the pass's ``ends`` alone, padded to the number of requests."""


class AttentionBackend(ABC):
    """Attention over a :class:`~flashrec.kvcache.pool.KVPool`, which it reads and never writes.

    The output of a row must not depend on which other rows are in the pass (SPEC R1, R2): reductions over
    keys run in tiles of a fixed size, aligned to position 0, in order.
    """

    name: str

    def __init__(self, pool: KVPool, num_heads: int) -> None:
        self.pool = pool
        self.num_heads = num_heads
        self.scale = pool.head_dim**-0.5

    @abstractmethod
    def prefill(self, meta: PrefillMeta) -> Attend:
        """Plan a causal pass over prompt tokens."""

    @abstractmethod
    def prefill_ends(self, meta: PrefillMeta) -> Attend:
        """Plan the same pass for the queries of ``meta.ends`` alone."""

    @abstractmethod
    def static_prefill(self, tokens: int, requests: int, pages: int) -> StaticPrefill:
        """Attention of captured prefill passes of up to ``tokens`` tokens of ``requests`` prompts."""

    @abstractmethod
    def decode(self, meta: DecodeMeta) -> Attend:
        """Plan a pass over beam rows."""
