"""Large catalogs: the bounds of SPEC S3, and filters of thousands of items against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrec.search.filters import UNUSED_KEY, FilterBuffers, LeafFilter
from flashrec_harness.catalogs import filters, suite
from flashrec_harness.outcome import Outcome, SuiteContext


@pytest.fixture
def context(tmp_path: Path) -> SuiteContext:
    return SuiteContext(model_path=tmp_path, out_dir=tmp_path / "reports")


FIGURES: dict[str, Any] = {
    "sids": 1_500_000,
    "load_cpu_s": 1.0,
    "trie_cpu_s": 0.1,
    "find_10000_items_cpu_s": 0.01,
    "device_mb": 12.0,
    "peak_mb": 300.0,
    "peak_before_mb": 100.0,
    "digest": "d",
    "dense_equals_csr": 2,
}
CACHED = FIGURES | {"load_cpu_s": 0.1}


def test_figures_within_their_bounds_pass() -> None:
    assert suite.judge(1_500_000, FIGURES, CACHED).outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"load_cpu_s": 2.1}, "over the bound: Parquet to catalog"),
        ({"device_mb": 20.1}, "over the bound: trie on a device"),
        ({"peak_mb": 2001.0}, "over the bound: peak of the process that reads"),
        ({"digest": "other"}, "the cache holds another catalog"),
        ({"sids": 1}, "the cache holds another catalog"),
    ],
)
def test_a_figure_over_its_bound_fails(change: dict[str, Any], reason: str) -> None:
    check = suite.judge(1_500_000, FIGURES | change, CACHED)
    assert check.outcome is Outcome.FAIL
    assert reason in check.reason


def test_a_slow_cache_fails() -> None:
    check = suite.judge(1_500_000, FIGURES, CACHED | {"load_cpu_s": 0.6})
    assert "over the bound: the same from the cache" in check.reason


@pytest.mark.slow
def test_a_small_catalog_is_read_in_a_process_of_its_own(context: SuiteContext) -> None:
    read, cached = suite.measure(context, 3000)
    assert read["sids"] == cached["sids"] == 3000
    assert read["digest"] == cached["digest"]
    assert read["dense_equals_csr"] == 3


def test_random_sids_are_distinct_and_in_no_order() -> None:
    sids = suite.shuffled_sids(5000, 1)
    assert len({tuple(sid) for sid in sids.tolist()}) == 5000
    assert not np.array_equal(sids, sids[np.lexsort(sids.T[::-1])])


@pytest.mark.slow
def test_a_million_and_a_half_sids_keep_their_bounds(context: SuiteContext) -> None:
    check = suite.judge(1_500_000, *suite.measure(context, 1_500_000))
    assert check.outcome is Outcome.PASS, check.reason


@pytest.mark.slow
def test_filters_of_thousands_return_the_oracles_lists(context: SuiteContext) -> None:
    checks = filters.run(context, filters.Scale(20_000, 2_000, 0.01))
    assert len(checks) == 4
    assert [check.outcome for check in checks] == [Outcome.PASS] * 4, [check.reason for check in checks]


@pytest.mark.slow
def test_the_oracle_notices_a_filter_that_is_ignored(context: SuiteContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "_ROUNDS", 1)
    monkeypatch.setattr(filters, "_REQUESTS", 1)
    monkeypatch.setattr(FilterBuffers, "load", _ignored)
    outcomes = [check.outcome for check in filters.run(context, filters.Scale(300, 200, 0.1))]
    assert outcomes == [Outcome.PASS, Outcome.FAIL, Outcome.FAIL, Outcome.FAIL]


def _ignored(self: FilterBuffers, members: object) -> None:
    return None


def ranks(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_a_shorter_list_leaves_nothing_of_a_longer_one() -> None:
    buffers = FilterBuffers(8, 2, torch.device("cpu"))
    buffers.load([LeafFilter(ranks(1, 5, 7), allow=False), LeafFilter(ranks(2), allow=True)])
    found = buffers.load([None, LeafFilter(ranks(3), allow=False)])
    assert found is not None
    assert found.keys.tolist() == [found.stride + 3, *[UNUSED_KEY] * 7]
    assert (found.allow.tolist(), found.exclude.tolist()) == ([False, False], [False, True])
    assert buffers.load([None, None]) is None
    again = buffers.load([LeafFilter(ranks(), allow=True), None])
    assert again is not None
    assert again.keys.tolist() == [UNUSED_KEY] * 8
