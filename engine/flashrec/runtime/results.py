"""From a finished wave's device state to ranked beams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.errors import NonFiniteError
from flashrec.request import Beam, Result
from flashrec.runtime.buffers import WaveLayout
from flashrec.runtime.member import Member, emitted_tokens
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
    """Each member's beams, best first; fewer than ``n`` where fewer are legal (SPEC S5)."""
    length = emitted_tokens(catalog, sids)
    tail = () if sids.end is None else (sids.end,)
    results: list[Result | NonFiniteError] = []
    for member, (start, width) in zip(members, layout.spans, strict=True):
        span = slice(start, start + width)
        live = np.flatnonzero(rows.valid[span]) + start
        if not np.isfinite(rows.score[live]).all():
            results.append(_non_finite(member))
            continue
        if member.request.temperature > 0:
            live = live[np.argsort(-rows.score[live], kind="stable")]
        beams = []
        for row in live[: member.request.n].tolist():
            codes = tuple(catalog.sids[rows.rank[row]].tolist())
            total = float(rows.score[row])
            beams.append(
                Beam(
                    token_ids=sids.token_ids(codes) + tail,
                    cumulative_logprob=total,
                    score=penalised(total, length, member.request.length_penalty),
                    finish_reason="stop",
                    sid=codes,
                    items=visible_items(member.request, catalog.items_of(int(rows.rank[row]))),
                )
            )
        results.append(_result(member, beams))
    return results


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
        beams = [
            Beam(
                token_ids=tuple(tokens[place, : lengths[place]].tolist()),
                cumulative_logprob=float(totals[place]),
                score=penalised(float(totals[place]), int(lengths[place]), member.request.length_penalty),
                finish_reason="stop" if stopped[place] else "length",
            )
            for place in filled.tolist()
        ]
        beams.sort(key=lambda beam: -beam.score)
        results.append(_result(member, beams[: member.request.n]))
    return results


def penalised(total: float, length: int, penalty: float) -> float:
    """``total / length ** penalty`` (SPEC B1), rounded to float32."""
    return float(np.float32(total / float(length) ** penalty))


def _result(member: Member, beams: list[Beam]) -> Result:
    return Result(
        rid=member.request.rid,
        beams=tuple(beams),
        prompt_tokens=member.length,
        cached_tokens=member.cached,
        score_space=member.key.space,
    )


def _non_finite(member: Member) -> NonFiniteError:
    return NonFiniteError(f"request {member.request.rid!r}: the model's scores are not finite; check the checkpoint")
