"""From a finished wave's device state to ranked beams."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.errors import NonFiniteError
from flashrec.request import Beam, LazyBeams, Result
from flashrec.runtime.buffers import WaveLayout
from flashrec.runtime.member import Member
from flashrec.search.expand import Frontier
from flashrec.search.filters import visible_items
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
    results: list[Result | NonFiniteError] = []
    for member, (start, width) in zip(members, layout.spans, strict=True):
        span = slice(start, start + width)
        live = np.flatnonzero(rows.valid[span]) + start
        if not np.isfinite(rows.score[live]).all():
            results.append(_non_finite(member))
            continue
        if member.request.temperature > 0:
            live = live[np.argsort(-rows.score[live], kind="stable")]
        kept = live[: member.request.n]
        build = functools.partial(_beams, member, rows.rank[kept], rows.score[kept], catalog, sids)
        results.append(_result(member, LazyBeams(build)))
    return results


def _beams(
    member: Member, ranks: NDArray[np.int32], totals: NDArray[np.float32], catalog: Catalog, sids: SidLayout
) -> list[Beam]:
    """The beams of SIDs ``ranks`` with summed log-probabilities ``totals``, column by column."""
    codes = catalog.sids[ranks]
    tokens = [book[codes[:, level]] for level, book in enumerate(sids.codebooks)]
    if sids.end is not None:
        tokens.append(np.full(len(codes), sids.end))
    scores = penalised(totals, len(tokens), member.request.length_penalty)
    named = list(map(tuple, codes.tolist()))
    items = map(functools.partial(visible_items, member.request), named, catalog.items_of_all(ranks))
    columns = (
        map(tuple, np.stack(tokens, axis=1).tolist()),
        totals.tolist(),
        scores.tolist(),
        itertools.repeat("stop"),
        named,
        items,
    )
    return [Beam(*fields) for fields in zip(*columns, strict=False)]


def free_results(members: list[Member], banks: list[Bank]) -> list[Result | NonFiniteError]:
    """Rank each member's finished hypotheses: by score, earlier banked first on a tie."""
    results: list[Result | NonFiniteError] = []
    for member, bank in zip(members, banks, strict=True):
        filled = np.flatnonzero(bank.filled.cpu().numpy())
        tokens, lengths = bank.tokens.cpu().numpy(), bank.length.cpu().numpy()
        totals, stopped = bank.total.cpu().numpy(), bank.stopped.cpu().numpy()
        if not np.isfinite(totals[filled]).all():
            results.append(_non_finite(member))
            continue
        scores = penalised(totals, lengths, member.request.length_penalty)
        beams = [
            Beam(
                token_ids=tuple(tokens[place, : lengths[place]].tolist()),
                cumulative_logprob=float(totals[place]),
                score=float(scores[place]),
                finish_reason="stop" if stopped[place] else "length",
            )
            for place in filled.tolist()
        ]
        beams.sort(key=lambda beam: -beam.score)
        results.append(_result(member, tuple(beams[: member.request.n])))
    return results


def penalised(totals: NDArray[np.float32], lengths: NDArray[np.int32] | int, penalty: float) -> NDArray[np.float32]:
    """``total / length ** penalty`` (SPEC B1) in float64, rounded to float32."""
    scores: NDArray[np.float32] = (totals / np.asarray(lengths, dtype=np.float64) ** penalty).astype(np.float32)
    return scores


def _result(member: Member, beams: Sequence[Beam]) -> Result:
    return Result(
        rid=member.request.rid,
        beams=beams,
        prompt_tokens=member.length,
        cached_tokens=member.cached,
        score_space=member.key.space,
    )


def _non_finite(member: Member) -> NonFiniteError:
    return NonFiniteError(f"request {member.request.rid!r}: the model's scores are not finite; check the checkpoint")
