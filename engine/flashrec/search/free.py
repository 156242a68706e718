"""Beam search over the full vocabulary, without a catalog, with a pool of finished beams (SPEC B4).

Two published semantics, which differ only when a stop token can be emitted:

``transformers`` (``generate(num_beams=k, early_stopping="never")``): of the best ``max(2, 1 + stops) * k``
candidates the first k without a stop token go on; a candidate with one is banked if it stands among the first
k of all. The bank keeps its k best by score. The search ends when the bank is full and the best running beam,
scored at the length most favourable to it, cannot beat the worst banked one.

``sglang`` (0.5.21): of the best ``2 * k`` candidates those without a stop token go on until there are k; one
with a stop token is banked if fewer than k survivors precede it. The bank is unbounded. The search ends early
only when fewer than k survive, and those are banked unfinished.

In both, the last step banks the first k candidates whatever they are, and k = 1 is greedy decoding.
Everything is fixed-shape tensor work: whether a search is over is a tensor, never a host branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashrec.request import Semantics
from flashrec.search.numerics import INVALID_KEY, log_sum_exp, order_key


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """P finished hypotheses: ``tokens`` int32 [P, steps], ``length`` int32, ``total`` float32, ``score``
    float32 (``total / length ** penalty``), ``filled`` and ``stopped`` bool, each [P]."""

    tokens: torch.Tensor
    length: torch.Tensor
    total: torch.Tensor
    score: torch.Tensor
    filled: torch.Tensor
    stopped: torch.Tensor

    @classmethod
    def empty(cls, size: int, steps: int, device: torch.device) -> Bank:
        return cls(
            tokens=torch.zeros(size, steps, dtype=torch.int32, device=device),
            length=torch.ones(size, dtype=torch.int32, device=device),
            total=torch.full((size,), -torch.inf, device=device),
            score=torch.full((size,), -torch.inf, device=device),
            filled=torch.zeros(size, dtype=torch.bool, device=device),
            stopped=torch.zeros(size, dtype=torch.bool, device=device),
        )

    def joined(self, other: Bank) -> Bank:
        return Bank(*(torch.cat(pair) for pair in zip(self._fields(), other._fields(), strict=True)))

    def rows(self, index: torch.Tensor) -> Bank:
        return Bank(*(values[index] for values in self._fields()))

    def _fields(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.length, self.total, self.score, self.filled, self.stopped


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The best continuations of one step in rank order: ``parent`` and ``token`` int32, ``total`` float32,
    ``stops`` bool, ``real`` bool (false where fewer exist), each [C]; ``tokens`` int32 [C, steps]."""

    parent: torch.Tensor
    token: torch.Tensor
    total: torch.Tensor
    stops: torch.Tensor
    real: torch.Tensor
    tokens: torch.Tensor


class FreeSearch:
    """The search of one request, ``width`` beams wide and at most ``steps`` tokens long."""

    def __init__(
        self,
        *,
        width: int,
        steps: int,
        stop_tokens: tuple[int, ...],
        length_penalty: float,
        semantics: Semantics,
        device: torch.device,
    ) -> None:
        self.width = width
        self.steps = steps
        self.length_penalty = length_penalty
        self.semantics: Semantics = semantics
        self.stops = torch.tensor(sorted(set(stop_tokens)), dtype=torch.int32, device=device)
        self.total = torch.zeros(1, device=device)
        self.running = torch.ones(1, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(1, steps, dtype=torch.int32, device=device)
        self.over = torch.zeros((), dtype=torch.bool, device=device)
        self.bank = Bank.empty(width if semantics == "transformers" else 0, steps, device)
        self._step = 0

    def advance(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step from ``logits`` [rows, V] of the running beams (one row at first, then ``width``).

        Returns ``parent`` (index of a row of ``logits``) and ``token``, both int32 [width], of the beams that
        go on; after the last step they mean nothing.
        """
        self._step += 1
        last = self._step == self.steps
        found = self._candidates(logits, self.width if last or self.width == 1 else self._candidate_count())
        if last:
            self._bank_last(found)
        elif self.width == 1:
            self._greedy(found)
        elif self.semantics == "transformers":
            self._transformers(found)
        else:
            self._sglang(found)
        going = self._survivors(found)
        self.total = found.total[going]
        self.tokens = found.tokens[going]
        return found.parent[going], found.token[going]

    def _candidate_count(self) -> int:
        factor = 2 if self.semantics == "sglang" else max(2, 1 + self.stops.shape[0])
        return factor * self.width

    def _candidates(self, logits: torch.Tensor, count: int) -> Candidates:
        """The best ``count`` continuations, or all where a vocabulary per row holds fewer."""
        raw = logits.float()
        rows, vocab = raw.shape
        total = self.total.unsqueeze(1) + (raw - log_sum_exp(raw).unsqueeze(1))
        rank = torch.arange(rows * vocab, device=raw.device).view(rows, vocab)
        keys = order_key(total, rank, self.running.unsqueeze(1)).flatten()
        best = torch.topk(keys, min(count, rows * vocab), sorted=True)
        index, real = best.indices, best.values > INVALID_KEY
        parent = torch.div(index, vocab, rounding_mode="floor")
        token = (index - parent * vocab).int()
        tokens = self.tokens[parent].clone()
        tokens[:, self._step - 1] = token
        return Candidates(
            parent=parent.int(),
            token=token,
            total=torch.where(real, total.flatten()[index], -torch.inf),
            stops=torch.isin(token, self.stops) & real,
            real=real,
            tokens=tokens,
        )

    def _survivors(self, found: Candidates) -> torch.Tensor:
        """Places of the first ``width`` candidates without a stop token; the rest fill up when there are fewer."""
        goes_on = found.real & ~found.stops
        place = torch.arange(goes_on.shape[0], device=goes_on.device)
        order = torch.argsort(torch.where(goes_on, place, place + goes_on.shape[0]))[: self.width]
        self.running = goes_on[order]
        return order

    def _entries(self, found: Candidates, enters: torch.Tensor, stopped: torch.Tensor) -> Bank:
        return Bank(
            tokens=found.tokens,
            length=torch.full_like(found.token, self._step),
            total=found.total,
            score=torch.where(enters, found.total / float(self._step) ** self.length_penalty, -torch.inf),
            filled=enters,
            stopped=stopped,
        )

    def _add(self, entries: Bank) -> None:
        """Bank what enters, unless the search is over; the transformers bank keeps its best ``width``."""
        entries = Bank(
            entries.tokens,
            entries.length,
            entries.total,
            entries.score,
            entries.filled & ~self.over,
            entries.stopped,
        )
        joined = self.bank.joined(entries)
        if self.semantics == "transformers":
            place = torch.arange(joined.score.shape[0], device=joined.score.device)
            keys = order_key(joined.score, place, joined.filled)
            joined = joined.rows(torch.topk(keys, self.width, sorted=True).indices)
        self.bank = joined

    def _bank_last(self, found: Candidates) -> None:
        stopped = found.stops if self.semantics == "transformers" else torch.zeros_like(found.stops)
        self._add(self._entries(found, found.real, stopped))

    def _greedy(self, found: Candidates) -> None:
        self._add(self._entries(found, found.stops, found.stops))
        self.over = self.over | found.stops[0]

    def _transformers(self, found: Candidates) -> None:
        place = torch.arange(found.stops.shape[0], device=found.stops.device)
        enters = found.stops & (place < self.width)
        self._add(self._entries(found, enters, found.stops))
        best_running = torch.where(found.real & ~found.stops, found.total, -torch.inf).amax()
        horizon = self.steps if self.length_penalty > 0 else self._step
        reachable = best_running / float(horizon) ** self.length_penalty
        worst = torch.where(self.bank.filled, self.bank.score, -torch.inf).amin()
        self.over = self.over | (self.bank.filled.all() & (reachable <= worst))

    def _sglang(self, found: Candidates) -> None:
        goes_on = found.real & ~found.stops
        preceding = torch.cumsum(goes_on.int(), 0) - goes_on.int()
        too_few = goes_on.sum() < self.width
        finished = found.stops & (preceding < self.width)
        # Insertion order of the bank: this step's stops, then the survivors of a search that ends here.
        self._add(self._entries(found, finished, found.stops))
        self._add(self._entries(found, goes_on & too_few, torch.zeros_like(found.stops)))
        self.over = self.over | too_few
