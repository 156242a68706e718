"""``/v1/recommend``: from a purchase history to the best items, with their titles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from flashrec.errors import CatalogError, RequestError
from flashrec.request import Request, Result, ScoreSpace
from flashrec.server.context import Context
from flashrec.server.filters import Entries, filter_fields, filter_names, resolve
from flashrec.server.jobs import Job, Payload
from flashrec.server.openai import usage
from flashrec.server.pins import Pins
from flashrec.server.prompts import HistoryEntry
from flashrec.server.schemas import Count, ItemOrSid, SearchOptions
from flashrec.sid.catalog import Catalog


class RecommendRequest(SearchOptions):
    """The body of ``/v1/recommend``. ``history`` is oldest first."""

    history: Annotated[list[ItemOrSid], Field(min_length=1)]
    k: Count = 10
    exclude_history: bool = False


def prepare(context: Context, body: RecommendRequest) -> Job:
    """Build the prompt from the history. Raises :class:`RequestError`."""
    pins = Pins(context.scheduler.engine)
    served = pins.find(body.catalog)
    if served is None:
        raise RequestError("history", "recommendations need a catalog: start the server with --sid-vocab-file")
    catalog = served.catalog
    history = [_entry(context, catalog, index, entry) for index, entry in enumerate(body.history)]
    # A semantic ID that the catalog lacks, withdrawn since perhaps, cannot come back anyway.
    known: Entries = [given for given, entry in zip(body.history, history, strict=True) if entry.item]
    seen: Entries = known if body.exclude_history else []
    request = Request(
        input_ids=context.history_prompt.token_ids(history),
        n=body.k,
        beam_width=body.beam_width,
        temperature=body.temperature or 0.0,
        seed=body.seed,
        length_penalty=body.length_penalty,
        score_space=None if body.score_space is None else ScoreSpace(body.score_space),
        catalog=served.label,
        **filter_fields([*body.exclude, *seen], body.allow, context.codec),
    )
    identity = f"rec-{os.urandom(16).hex()}"

    def render(results: Sequence[Result]) -> Payload:
        (result,) = results
        return {
            "id": identity,
            "object": "recommendation",
            "model": context.model_name,
            "catalog": result.catalog,
            "items": top_items(context, catalog, result, body.k),
            "usage": usage(results),
        }

    names = filter_names() | {"n": "k", "input_ids": "history"}
    return Job(requests=[request], render=render, names=names, timeout=body.timeout, pins=pins, beam_bytes=256)


def top_items(context: Context, catalog: Catalog, result: Result, k: int) -> list[dict[str, object]]:
    """The first ``k`` distinct items in rank order; items of one SID share its score."""
    layout = context.codec.layout
    assert layout is not None
    ranked: dict[str, dict[str, object]] = {}
    for beam in result.beams:
        assert beam.sid is not None
        for item in beam.items:
            if item in ranked:
                continue
            if len(ranked) == k:
                break
            ranked[item] = {
                "rank": len(ranked) + 1,
                "item_id": item,
                "title": None,
                "score": beam.score,
                "cumulative_logprob": beam.cumulative_logprob,
                "sid": list(beam.sid),
                "sid_text": layout.text(beam.sid),
            }
    for row, title in zip(ranked.values(), catalog.titles_of(list(ranked)), strict=True):
        row["title"] = title
    return list(ranked.values())


def _entry(context: Context, catalog: Catalog, index: int, entry: str | int | list[int]) -> HistoryEntry:
    """What the template sees of one entry. Raises :class:`RequestError` on ``history[index]``."""
    field = f"history[{index}]"
    sids, items = resolve("history", [entry], context.codec)
    if sids:
        rank = int(catalog.rank(list(sids))[0])
        names = catalog.items_of(rank) if rank >= 0 else ()
        item = names[0] if names else ""
        return HistoryEntry(context.codec.wrapped_sid(sids[0]), sids[0], item, catalog.title_of(item) or "")
    try:
        rank = int(catalog.ranks_of_items(items)[0])
    except CatalogError:
        raise RequestError(field, f"no item {items[0]!r} in the catalog") from None
    codes = tuple(int(code) for code in catalog.sids[rank])
    return HistoryEntry(context.codec.wrapped_sid(codes), codes, items[0], catalog.title_of(items[0]) or "")
