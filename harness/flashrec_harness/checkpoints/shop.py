"""A synthetic shop whose next purchase has a known distribution.

Items stand in *series* (a department and a line: the first two codes), a series has a popularity order. A
user has a fixed taste and an interest that wanders; both are hidden. The next purchase is drawn from

    p(item | interest, taste, last) = s(series | interest, series of last) * w(item | series, taste)
    s = more * [same series] + goes_with * companion(series of last) + browse * browsing(interest)

so the hidden state follows the forward algorithm and the Bayes-optimal ranking is computed exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flashrec_harness.checkpoints.sequences import History
from flashrec_harness.checkpoints.titles import TitleMaker

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopConfig:
    """Sizes and mixture weights of a :class:`Shop`; the default has about 3,000 items."""

    codebook_sizes: tuple[int, int, int] = (32, 48, 64)
    departments: int = 24
    series_per_department: tuple[int, int] = (4, 12)
    items_per_series: tuple[int, int] = (1, 30)
    shared_sid_share: float = 0.02
    interests: int = 24
    tastes: int = 3
    stay: float = 0.95
    more: float = 0.3
    goes_with: float = 0.3
    series_drop: float = 3.0
    item_drop: float = 0.7
    taste_log_weight: float = 0.5
    department_shares: tuple[float, ...] = (1.0,)
    companion_shares: tuple[float, float] = (0.9, 0.1)
    onward_shares: tuple[float, ...] = (0.7, 0.3)


class Shop:
    """The items, and the distribution over what a user buys next.

    ``sids``: int64 ``[num_sids, 3]`` codes, distinct. ``items``: item id to row of ``sids``; about
    ``shared_sid_share`` of the SIDs name two items. All probabilities are over SIDs, float64.
    """

    def __init__(self, config: ShopConfig | None = None, *, seed: int = 0) -> None:
        self.config = config or ShopConfig()
        rng = np.random.default_rng(seed)
        self.sids, self.series, series_department = self._lay_out(rng)
        self.num_series = len(series_department)
        self.item_weight = self._item_weights(rng)
        self.browsing = self._browsing(rng, series_department)
        self.companion = self._companions(rng)
        self.interest_step = self._interest_steps(rng)
        self.items, self.titles = self._name_items(rng, series_department)

    def _lay_out(self, rng: np.random.Generator) -> tuple[Ints, Ints, Ints]:
        """Draw departments, series and items: SID codes, series of each SID, department of each series."""
        c = self.config
        sids: list[tuple[int, int, int]] = []
        series: list[int] = []
        departments: list[int] = []
        a_codes = rng.choice(c.codebook_sizes[0], c.departments, replace=False)
        for department, a in enumerate(a_codes):
            lines = rng.integers(*c.series_per_department, endpoint=True)
            for b in rng.choice(c.codebook_sizes[1], lines, replace=False):
                count = rng.integers(*c.items_per_series, endpoint=True)
                sids += [(a, b, code) for code in rng.choice(c.codebook_sizes[2], count, replace=False)]
                series += [len(departments)] * count
                departments.append(department)
        return np.array(sids), np.array(series), np.array(departments)

    def _item_weights(self, rng: np.random.Generator) -> Floats:
        """``w``: ``[tastes, num_sids]``, summing to 1 within each series. The last code carries the taste."""
        c = self.config
        popularity = np.zeros(len(self.sids))
        for s in range(self.num_series):
            members = np.flatnonzero(self.series == s)
            popularity[members] = geometric(rng.permutation(len(members)), c.item_drop)
        suits = self.sids[:, 2] % c.tastes == np.arange(c.tastes)[:, None]
        weight = popularity * np.exp(c.taste_log_weight * suits)
        totals = np.stack([np.bincount(self.series, row, self.num_series) for row in weight])
        shares: Floats = weight / totals[:, self.series]
        return shares

    def _browsing(self, rng: np.random.Generator, series_department: Ints) -> Floats:
        """``[interests, num_series]``: each interest looks at three departments, unevenly."""
        c = self.config
        out = np.zeros((c.interests, self.num_series))
        for interest in range(c.interests):
            liked = rng.choice(c.departments, len(c.department_shares), replace=False)
            for department, share in zip(liked, c.department_shares, strict=True):
                members = np.flatnonzero(series_department == department)
                out[interest, members] = share * geometric(rng.permutation(len(members)), c.series_drop)
        return out

    def _companions(self, rng: np.random.Generator) -> Floats:
        """``[num_series, num_series]``: every series goes with two others."""
        out = np.zeros((self.num_series, self.num_series))
        for s in range(self.num_series):
            first, second = rng.choice(self.num_series, 2, replace=False)
            out[s, first], out[s, second] = self.config.companion_shares
        return out

    def _interest_steps(self, rng: np.random.Generator) -> Floats:
        """``[interests, interests]`` transition matrix: stay, or move on to one of a few others."""
        c = self.config
        out = np.eye(c.interests) * c.stay
        for interest in range(c.interests):
            others = rng.permutation(np.delete(np.arange(c.interests), interest))
            out[interest, others[: len(c.onward_shares)]] += (1 - c.stay) * np.array(c.onward_shares)
        return out

    def _name_items(self, rng: np.random.Generator, series_department: Ints) -> tuple[dict[str, int], dict[str, str]]:
        """Item ids (in shuffled order) and titles; some SIDs get a second item, a multipack of the first."""
        maker = TitleMaker(rng, series_department)
        shared = rng.random(len(self.sids)) < self.config.shared_sid_share
        rows = rng.permutation(np.concatenate([np.arange(len(self.sids)), np.flatnonzero(shared)]))
        items: dict[str, int] = {}
        titles: dict[str, str] = {}
        seen: set[int] = set()
        for number, row in enumerate(rows.tolist()):
            item = f"P{number + 1:04d}"
            items[item] = row
            title = maker.title(int(self.series[row]), int(self.sids[row, 2]))
            titles[item] = f"{title}, pack of 2" if row in seen else title
            seen.add(row)
        return items, titles

    @cached_property
    def items_of_sid(self) -> list[list[str]]:
        """Row of ``sids`` to the items it names."""
        out: list[list[str]] = [[] for _ in range(len(self.sids))]
        for item, row in self.items.items():
            out[row].append(item)
        return out

    def series_probs(self, last: int | None) -> Floats:
        """``s``: ``[interests, num_series]``, given the series of the last purchase (None: the first one)."""
        if last is None:
            return self.browsing
        c = self.config
        out: Floats = (1 - c.more - c.goes_with) * self.browsing + c.goes_with * self.companion[last]
        out[:, last] += c.more
        return out

    def next_sid_probs(self, history: Sequence[str]) -> Floats:
        """``[num_sids]``: the exact distribution of the next purchase after ``history`` (item ids, oldest first)."""
        c = self.config
        belief = np.full((c.interests, c.tastes), 1 / (c.interests * c.tastes))
        last: int | None = None
        for item in history:
            row = self.items[item]
            series = int(self.series[row])
            belief *= self.series_probs(last)[:, series][:, None] * self.item_weight[:, row]
            belief = self.interest_step.T @ (belief / belief.sum())
            last = series
        by_series = belief.T @ self.series_probs(last)
        total: Floats = (by_series[:, self.series] * self.item_weight).sum(0)
        return total

    def sample(self, users: int, *, seed: int, lengths: tuple[int, int] = (4, 11)) -> list[History]:
        """Draw ``users`` purchase histories whose lengths are uniform in ``lengths`` (both included)."""
        c = self.config
        rng = np.random.default_rng(seed)
        starts = [None, *range(self.num_series)]
        series_after = np.stack([self.series_probs(last) for last in starts])
        length = rng.integers(*lengths, users, endpoint=True)
        interest, taste = rng.integers(c.interests, size=users), rng.integers(c.tastes, size=users)
        series = np.full(users, -1)
        rows = np.empty((users, lengths[1]), np.int64)
        for step in range(lengths[1]):
            series = draw(rng, series_after[series + 1, interest])
            rows[:, step] = self._draw_items(rng, series, taste)
            interest = draw(rng, self.interest_step[interest])
        copies = rng.random(rows.shape)
        return [
            History(f"U{user + 1:05d}", tuple(map(self._name, rows[user, :count], copies[user])))
            for user, count in enumerate(length.tolist())
        ]

    def _draw_items(self, rng: np.random.Generator, series: Ints, taste: Ints) -> Ints:
        """A row of ``sids`` per user, from the given series. Rows of a series stand together."""
        first = np.searchsorted(self.series, np.arange(self.num_series + 1))
        upto = np.concatenate([np.zeros((self.config.tastes, 1)), self.item_weight.cumsum(1)], axis=1)
        low, high = upto[taste, first[series]], upto[taste, first[series + 1]]
        point = low + rng.random(len(series)) * (high - low)
        rows = np.empty(len(series), np.int64)
        for kind in range(self.config.tastes):
            chosen = taste == kind
            rows[chosen] = np.searchsorted(upto[kind], point[chosen], side="right") - 1
        return np.clip(rows, first[series], first[series + 1] - 1)

    def _name(self, row: int, copy: float) -> str:
        names = self.items_of_sid[row]
        return names[int(copy * len(names))]


def geometric(ranks: Ints, drop: float) -> Floats:
    """Weights proportional to ``exp(-drop * rank)``, summing to 1: neighbours differ by ``drop`` nats."""
    weights = np.exp(-drop * ranks)
    shares: Floats = weights / weights.sum()
    return shares


def draw(rng: np.random.Generator, probs: Floats) -> Ints:
    """One index per row of ``probs``, float64 ``[rows, choices]``, by inversion."""
    upto = probs.cumsum(1)
    index: Ints = (rng.random((len(probs), 1)) * upto[:, -1:] >= upto).sum(1)
    return index
