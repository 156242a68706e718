"""Digests of what every decode step saw and chose, computed on the device (SPEC R3).

A digest is a wrapping int64 sum of mixed integers, one per request, so it needs no order and no host sync.
Physical page numbers differ between runs; what is hashed is the *content tag* of each page, which names
the tokens that should lie in it: a page that was recycled too early shows as another tag. Positions are those
that passes were given, kept beside the slots whose keys they rotated: a cached page answers for the pass that
filled it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashrec.kvcache.pool import SCRATCH_PAGE, KVPool
from flashrec.kvcache.radix import page_tag
from flashrec.runtime.buffers import DecodeBuffers
from flashrec.runtime.member import Member
from flashrec.search.numerics import mix64

FIELDS = ("seq_lens", "positions", "kv", "logits", "tokens", "parents", "scores")
"""``seq_lens`` and ``positions`` are what a step was given, ``logits`` what it computed from that, the last three
what was selected from these; ``kv`` names what lies behind its beams after the selection."""


@dataclass(frozen=True, slots=True)
class StepDigest:
    """One step of one request: a digest per entry of :data:`FIELDS`."""

    step: int
    digests: dict[str, int]


class SlotPositions:
    """``table`` int32 [slots]: the position that the key in each slot of the pool was rotated with."""

    def __init__(self, pool: KVPool) -> None:
        self.page_size = pool.page_size
        self.beam_base = pool.beam_base
        self.table = torch.zeros(pool.k.shape[1], dtype=torch.int32, device=pool.k.device)

    def note(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """A pass stores its keys, rotated by ``positions`` int32 [T], in ``slots`` int32 [T]."""
        self.table[slots.long()] = positions


class Ledger:
    """The records of one bucket, int64 [steps, fields, requests], the pool's page tags and its keys' positions."""

    def __init__(self, buffers: DecodeBuffers, tags: torch.Tensor, positions: SlotPositions, steps: int) -> None:
        self.buffers = buffers
        self.tags = tags
        self.positions = positions
        self.records = torch.zeros(steps, len(FIELDS), buffers.requests, dtype=torch.int64, device=tags.device)

    def record(
        self,
        step: int,
        *,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        scores: torch.Tensor,
        valid: torch.Tensor,
        logits: torch.Tensor,
        rows: torch.Tensor,
        rows_valid: torch.Tensor,
    ) -> None:
        """Digest a selection: ``tokens``, ``parents``, ``scores``, ``valid`` [B] after it, and the ``logits``
        [N, W] that it saw: ``rows`` int64 [N] is the request of each, ``rows_valid`` bool [N] leaves out padding."""
        buffers = self.buffers
        owner = buffers.row_request
        rank = buffers.row_index - buffers.later[0, owner]
        first_parent = buffers.later[0, owner] if step else owner.int()
        values = {
            "tokens": tokens.long(),
            "parents": (parents - first_parent).long(),
            "scores": (scores + 0.0).view(torch.int32).long(),
        }
        live = valid.long()
        for name, value in values.items():
            self._sum(step, name, mix64(value ^ mix64(rank.long())) * live, owner)
        bits = mix64(logits.float().view(torch.int32).long()).sum(1) * rows_valid.long()
        self._sum(step, "logits", bits, rows)
        if step:
            self._sum(step, "positions", mix64(self._beam_positions(step) ^ mix64(rank.long())) * rows_valid, rows)
        else:
            self.records[step, FIELDS.index("positions")] = self._prompt_positions()
        self.records[step, FIELDS.index("seq_lens")] = mix64((buffers.context_len + step).long())
        self.records[step, FIELDS.index("kv")] = self._context()
        if step:
            self.records[step, FIELDS.index("kv")].index_add_(0, owner, self._lineage(step, owner, rank) * live)

    def _sum(self, step: int, name: str, values: torch.Tensor, owner: torch.Tensor) -> None:
        field = self.records[step, FIELDS.index(name)]
        field.zero_()
        field.index_add_(0, owner, values)

    def _prompt_positions(self) -> torch.Tensor:
        """int64 [requests]: where each prompt's keys stand, by the passes that stored them."""
        size, table = self.positions.page_size, self.buffers.page_table
        place = torch.arange(table.shape[1] * size, device=table.device)
        slots = table.long().repeat_interleave(size, dim=1) * size + place % size
        stored = place < self.buffers.context_len.unsqueeze(1)
        return (mix64(self.positions.table[slots].long() ^ mix64(place)) * stored).sum(1)

    def _beam_positions(self, step: int) -> torch.Tensor:
        """int64 [B]: the position of each row in the pass that this step's logits come from."""
        first = self.positions.beam_base + (step - 1) * self.buffers.rows
        return self.positions.table[first : first + self.buffers.rows].long()

    def _lineage(self, step: int, owner: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        """int64 [B]: in which rows of its request a beam's earlier tokens stand."""
        rows = (self.buffers.ancestors[:step] - self.buffers.later[0, owner]).long()
        path = mix64(rows + torch.arange(step, device=owner.device).unsqueeze(1)).sum(0)
        return mix64(path ^ rank.long())

    def _context(self) -> torch.Tensor:
        table = self.buffers.page_table
        place = torch.arange(table.shape[1], device=table.device)
        used = (table != SCRATCH_PAGE).long()
        return (mix64(self.tags[table.long()] ^ mix64(place)) * used).sum(1)

    def read(self, requests: int) -> list[tuple[StepDigest, ...]]:
        """The records of the last wave on these buffers, per request; reads them before another one runs."""
        host = self.records[:, :, :requests].cpu().tolist()
        return [
            tuple(
                StepDigest(step, {name: host[step][index][request] for index, name in enumerate(FIELDS)})
                for step in range(len(host))
            )
            for request in range(requests)
        ]


def write_tags(tags: torch.Tensor, members: list[Member], pool: KVPool) -> None:
    """Name the content of every page that the members fill, the partial last page included.

    A cached page keeps the name that it got from the wave that filled it: had another wave filled it since,
    a hit would show that wave's name.
    """
    pages, values = [], []
    for member in members:
        cached = len(member.path)
        tag = member.path[-1].tag if member.path else 0
        for index, page in enumerate(member.pages[cached:], cached):
            key = member.tokens[index * pool.page_size : (index + 1) * pool.page_size].astype("<i4").tobytes()
            tag = page_tag(tag, key)
            pages.append(page)
            values.append(tag)
    tags[torch.tensor(pages, device=tags.device)] = torch.tensor(values, device=tags.device)
