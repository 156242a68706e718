"""Per-request exclusion and allow lists, enforced while the trie is walked (SPEC B7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.errors import CatalogError, RequestError
from flashrec.request import Request
from flashrec.sid.catalog import Catalog
from flashrec.sid.sorting import distinct
from flashrec.transfer import overwrite

Ranks = NDArray[np.int64]
UNUSED_KEY = np.iinfo(np.int64).max
REQUEST_STRIDE = 1 << 31
"""Above every rank, which is int32: the keys of one request lie between those of its neighbours in any catalog."""


@dataclass(frozen=True, slots=True, eq=False)
class LeafFilter:
    """SIDs of one request by rank, sorted: those it must not return, or with ``allow`` all that it may."""

    ranks: Ranks
    allow: bool


@dataclass(frozen=True, slots=True, eq=False)
class FilterSet:
    """The filters of a wave on the device.

    ``keys`` int64 [F]: ``request * stride + rank``, sorted, so that one binary search serves all requests;
    ``allow`` and ``exclude`` bool [R]: which requests have which kind.
    """

    keys: torch.Tensor
    stride: int
    allow: torch.Tensor
    exclude: torch.Tensor

    def alive(self, request: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Whether SIDs ``first .. last - 1`` hold one that ``request`` may return; int64 in, bool out."""
        base = request * self.stride
        listed = torch.searchsorted(self.keys, base + last) - torch.searchsorted(self.keys, base + first)
        allowed = ~self.allow[request] | (listed > 0)
        return allowed & (~self.exclude[request] | (listed < last - first))


def resolve_filter(request: Request, catalog: Catalog) -> LeafFilter | None:
    """The request's filter in SID ranks, or ``None``. An item is excluded with its SID only when the SID
    names no other item that stays; the result drops excluded items from a SID that stays. An item that is both
    allowed and excluded allows nothing: its SID's other items were not asked for.

    Raises:
        RequestError: an unknown SID or item, naming the field.
    """
    has_exclude = bool(request.exclude_sids or request.exclude_items)
    has_allow = request.allow_sids is not None or request.allow_items is not None
    if not has_exclude and not has_allow:
        return None
    excluded = _union(
        _sid_ranks("exclude_sids", request.exclude_sids, catalog),
        _item_ranks("exclude_items", request.exclude_items, catalog.ranks_emptied_by),
    )
    if not has_allow:
        return LeafFilter(excluded, allow=False)
    allowed = _union(
        _sid_ranks("allow_sids", request.allow_sids or (), catalog),
        _allowed_item_ranks(request.allow_items or (), request.exclude_items, catalog),
    )
    return LeafFilter(np.setdiff1d(allowed, excluded, assume_unique=True), allow=True)


class FilterBuffers:
    """The static device tensors behind the :class:`FilterSet` of every wave, whatever its catalog.

    ``capacity`` bounds the listed SIDs of a wave; unused keys are the largest int64, which no search reaches.
    """

    def __init__(self, capacity: int, requests: int, device: torch.device) -> None:
        self.capacity = capacity
        self._filled = 0
        self.filters = FilterSet(
            keys=torch.full((capacity,), UNUSED_KEY, dtype=torch.int64, device=device),
            stride=REQUEST_STRIDE,
            allow=torch.zeros(requests, dtype=torch.bool, device=device),
            exclude=torch.zeros(requests, dtype=torch.bool, device=device),
        )

    def load(self, filters: Sequence[LeafFilter | None]) -> FilterSet | None:
        """Write the filters of a wave's requests; ``None`` when no request has one."""
        if all(item is None for item in filters):
            return None
        target = self.filters
        listed = [request * target.stride + item.ranks for request, item in enumerate(filters) if item is not None]
        joined = np.concatenate(listed)
        # Only what this wave or the last one fills: the capacity is megabytes, most lists are not.
        keys = np.full(max(len(joined), self._filled), UNUSED_KEY, dtype=np.int64)
        keys[: len(joined)] = joined
        self._filled = len(joined)
        kinds = np.zeros((2, len(target.allow)), dtype=np.bool_)
        for request, item in enumerate(filters):
            if item is not None:
                kinds[0 if item.allow else 1, request] = True
        overwrite(target.keys[: len(keys)], keys)
        overwrite(target.allow, kinds[0])
        overwrite(target.exclude, kinds[1])
        return target


class VisibleItems:
    """The items of a returned SID without those that the request excludes or does not allow.

    A SID that ``allow_sids`` names brings all its items, another only those that ``allow_items`` names. The
    request's lists are read once, not once per beam.
    """

    def __init__(self, request: Request) -> None:
        self._hidden = frozenset(request.exclude_items)
        self._allowed = None if request.allow_items is None else frozenset(request.allow_items)
        self._whole = frozenset(() if self._allowed is None else request.allow_sids or ())

    def __call__(self, sid: tuple[int, ...], items: Sequence[str]) -> tuple[str, ...]:
        if not self._hidden and self._allowed is None:
            return tuple(items)
        kept = [item for item in items if item not in self._hidden]
        if self._allowed is not None and sid not in self._whole:
            kept = [item for item in kept if item in self._allowed]
        return tuple(kept)


def _union(one: Ranks, other: Ranks) -> Ranks:
    """Of sorted, distinct ranks."""
    return np.union1d(one, other) if len(one) and len(other) else one if len(one) else other


def _sid_ranks(field: str, sids: Sequence[tuple[int, ...]], catalog: Catalog) -> Ranks:
    if not sids:
        return np.empty(0, dtype=np.int64)
    if set(map(len, sids)) != {catalog.depth}:
        odd = next(sid for sid in sids if len(sid) != catalog.depth)
        raise RequestError(field, f"SID {list(odd)} has {len(odd)} codes, the catalog's have {catalog.depth}")
    ranks = catalog.rank(np.array(sids, dtype=np.int64)).astype(np.int64)
    if (ranks < 0).any():
        raise RequestError(field, f"SID {list(sids[int(np.argmin(ranks))])} is not in the catalog")
    return distinct(ranks)[0]


def _allowed_item_ranks(allowed: Sequence[str], excluded: Sequence[str], catalog: Catalog) -> Ranks:
    ranks = _item_ranks("allow_items", allowed, catalog.ranks_of_items)
    both = set(allowed).intersection(excluded)
    if not both:
        return ranks
    staying = [item for item in allowed if item not in both]
    return _item_ranks("allow_items", staying, catalog.ranks_of_items)


def _item_ranks(field: str, items: Sequence[str], select: Callable[[Sequence[str]], NDArray[np.int32]]) -> Ranks:
    if not items:
        return np.empty(0, dtype=np.int64)
    try:
        return select(items).astype(np.int64)
    except CatalogError as error:
        raise RequestError(field, str(error)) from None
