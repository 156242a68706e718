"""From a finished wave's device state to ranked beams."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from flashrec.errors import NonFiniteError
from flashrec.request import Beam, BeamArrays, BeamColumns, JsonColumn, LazyBeams, Request, Result
from flashrec.runtime.buffers import WaveLayout
from flashrec.runtime.member import Member
from flashrec.search.expand import Frontier
from flashrec.search.filters import VisibleItems
from flashrec.search.free import Bank
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout


@dataclass(frozen=True, slots=True)
class HostFrontier:
    """The final rows on the host: SID ``rank`` int32, ``score`` float32, ``valid`` bool, each [rows]."""

    rank: NDArray[np.int32]
    score: NDArray[np.float32]
    valid: NDArray[np.bool_]


def pack_frontier(frontier: Frontier) -> torch.Tensor:
    """int32 [3, rows], so that a wave's result crosses to the host in one copy."""
    return torch.stack((frontier.node, frontier.score.view(torch.int32), frontier.valid.int()))


def unpack_frontier(packed: torch.Tensor) -> HostFrontier:
    """The inverse of :func:`pack_frontier`, from host memory."""
    rank, score, valid = packed.numpy()
    return HostFrontier(rank, score.view(np.float32), valid.astype(np.bool_))


def catalog_results(
    members: list[Member], layout: WaveLayout, rows: HostFrontier, catalog: Catalog, sids: SidLayout
) -> list[Result | NonFiniteError]:
    """Each member's beams, best first; fewer than ``n`` where fewer are legal (SPEC S5).

    They are built when somebody first looks at them, on the thread that does: not on the engine's.
    """
    kept = _kept_rows(members, layout, rows)
    found = np.concatenate(kept)
    # Not the members: they hold what the device keeps for their catalog.
    requests = [member.request for member in members]
    wave = WaveBeams(requests, [len(each) for each in kept], rows.rank[found], rows.score[found], catalog, sids)
    return [
        _non_finite(member) if not np.isfinite(rows.score[found]).all() else _result(member, wave.lazy(index))
        for index, (member, found) in enumerate(zip(members, kept, strict=True))
    ]


def _kept_rows(members: Sequence[Member], layout: WaveLayout, rows: HostFrontier) -> list[NDArray[np.intp]]:
    """Each member's result rows, best first."""
    (live,) = rows.valid.nonzero()
    starts = np.array(layout.starts)
    bounds = live.searchsorted((starts, starts + layout.widths)).T.tolist()
    return [
        _best(member.request, rows, live[first:last]) for member, (first, last) in zip(members, bounds, strict=True)
    ]


def _best(request: Request, rows: HostFrontier, live: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of a request's live rows, in rank order, those to return; a sampled search ranks by noise, returns by score."""
    if request.temperature > 0:
        live = live[np.argsort(-rows.score[live], kind="stable")]
    return live[: request.n]


class WaveBeams:
    """The beams of a catalog wave, made column by column for all of its requests at once.

    ``ranks`` int32 and ``totals`` float32 [beams] are the SIDs found and the sums of their log-probabilities, request
    after request, best first; ``counts`` says how many each request has.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        ranks: NDArray[np.int32],
        totals: NDArray[np.float32],
        catalog: Catalog,
        sids: SidLayout,
    ) -> None:
        self._requests = requests
        self._counts = counts
        self._ends = list(itertools.accumulate(counts))
        self._ranks, self._totals = ranks, totals
        self._catalog = catalog
        self._sids = sids

    def lazy(self, index: int) -> LazyBeams:
        """The beams of request ``index``, made when somebody looks at them."""
        return LazyBeams(self, index)

    def beams_of(self, index: int) -> list[Beam]:
        """The beams of request ``index``."""
        span = self._span(index)
        tokens, totals, codes = self._columns
        scores, shown = self._scores[span].tolist(), self._shown(index)
        fields = tokens[span], totals[span], scores, itertools.repeat("stop"), codes[span], shown
        return list(map(_BEAM, zip(*fields, strict=False)))

    def columns_of(self, index: int) -> BeamColumns:
        """The same without an object for each."""
        span, request = self._span(index), self._requests[index]
        items = (
            JsonColumn(list(map(orjson.dumps, self._shown(index))))
            if _hides(request)
            else self._catalog.items_json(self._ranks[span])
        )
        return BeamColumns(self._token_ids[span], self._totals[span], self._scores[span], self._codes[span], items)

    def arrays_of(self, index: int) -> BeamArrays:
        """The same as arrays."""
        span = self._span(index)
        return BeamArrays(self._token_ids[span], self._totals[span], self._scores[span], self._ranks[span])

    def found_of(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """``ranks`` and ``totals`` of request ``index``."""
        span = self._span(index)
        return self._ranks[span], self._totals[span]

    def _shown(self, index: int) -> list[tuple[str, ...]]:
        """The items of each beam of request ``index``, less those that it does not want to see."""
        span, request = self._span(index), self._requests[index]
        items = self._items[span]
        if _hides(request):
            sids = map(tuple, self._codes[span].tolist())
            return list(map(VisibleItems(request), sids, items))
        return items

    def _span(self, index: int) -> slice:
        return slice(self._ends[index - 1] if index else 0, self._ends[index])

    @functools.cached_property
    def _scores(self) -> NDArray[np.float32]:
        penalties = np.array([request.length_penalty for request in self._requests], dtype=np.float64)
        return penalised(self._totals, self._token_ids.shape[1], penalties.repeat(self._counts))

    @functools.cached_property
    def _codes(self) -> NDArray[np.int32]:
        return self._catalog.sids[self._ranks]

    @functools.cached_property
    def _token_ids(self) -> NDArray[np.int32]:
        """int32 [beams, length]: a beam's codes as tokens, and an implied end token."""
        layout = self._sids
        tokens = layout.tokens_in_a_row.take(self._codes + layout.firsts)
        if layout.end is None:
            return tokens
        ends = np.full((len(tokens), 1), layout.end, dtype=np.int32)
        return np.concatenate((tokens, ends), axis=1)

    @functools.cached_property
    def _items(self) -> list[tuple[str, ...]]:
        """All items of every beam's SID."""
        return self._catalog.items_of_all(self._ranks)

    @functools.cached_property
    def _columns(self) -> tuple[list[tuple[int, ...]], list[float], list[tuple[int, ...]]]:
        """Token ids, sums and codes of every beam."""
        tokens, codes = (list(zip(*table.T.tolist(), strict=True)) for table in (self._token_ids, self._codes))
        return tokens, self._totals.tolist(), codes


def _hides(request: Request) -> bool:
    """Whether it may not want to see an item of a SID that it does want."""
    return bool(request.exclude_items) or request.allow_items is not None


_BEAM: Callable[[Iterable[Any]], Beam] = functools.partial(tuple.__new__, Beam)  # Beam._make without its Python frame
"""A beam from its fields in order."""


def free_results(members: list[Member], banks: list[Bank]) -> list[Result | NonFiniteError]:
    """Rank each member's finished hypotheses: by score in float64, earlier banked first on a tie."""
    results: list[Result | NonFiniteError] = []
    for member, bank in zip(members, banks, strict=True):
        filled = np.flatnonzero(bank.filled.cpu().numpy())
        tokens, lengths = bank.tokens.cpu().numpy(), bank.length.cpu().numpy()
        totals, stopped = bank.total.cpu().numpy(), bank.stopped.cpu().numpy()
        if not np.isfinite(totals[filled]).all():
            results.append(_non_finite(member))
            continue
        exact = penalised_exactly(totals, lengths, member.request.length_penalty)
        order = filled[np.argsort(-exact[filled], kind="stable")]
        beams = [
            Beam(
                token_ids=tuple(tokens[place, : lengths[place]].tolist()),
                cumulative_logprob=float(totals[place]),
                score=float(np.float32(exact[place])),
                finish_reason="stop" if stopped[place] else "length",
            )
            for place in order[: member.request.n].tolist()
        ]
        results.append(_result(member, tuple(beams)))
    return results


def penalised_exactly(
    totals: NDArray[np.float32], lengths: NDArray[np.int32] | int, penalty: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """``total / length ** penalty`` (SPEC B1) in float64."""
    scores: NDArray[np.float64] = totals / np.asarray(lengths, dtype=np.float64) ** penalty
    return scores


def penalised(
    totals: NDArray[np.float32], lengths: NDArray[np.int32] | int, penalty: float | NDArray[np.float64]
) -> NDArray[np.float32]:
    """:func:`penalised_exactly`, rounded to the float32 that a beam carries."""
    return penalised_exactly(totals, lengths, penalty).astype(np.float32)


def _result(member: Member, beams: Sequence[Beam]) -> Result:
    return Result(
        rid=member.request.rid,
        beams=beams,
        prompt_tokens=member.length,
        cached_tokens=member.cached,
        score_space=member.key.space,
        catalog=None if member.served is None else member.served.label,
    )


def _non_finite(member: Member) -> NonFiniteError:
    return NonFiniteError(f"request {member.request.rid!r}: the model's scores are not finite; check the checkpoint")
