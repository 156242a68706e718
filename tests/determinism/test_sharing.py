"""Processes side by side: as many as the device holds, never none, never more than the suite has."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec_harness import hardware
from flashrec_harness.determinism import sharing

GIB = 1 << 30
KV = 28 * 2 * 8 * 128 * 2
"""Bytes a token of Qwen3-1.7B: 28 layers, keys and values, 8 heads of 128, bf16."""


@pytest.mark.parametrize(
    ("memory_gib", "weights_gib", "processes"),
    # each takes 2 x weights + 7 GiB of pool + 10 GiB
    [(139, 0.1, 4), (139, 3.4, 4), (80, 3.4, 3), (139, 16, 2), (48, 16, 1), (24, 64, 1)],
)
def test_as_many_as_fit(memory_gib: float, weights_gib: float, processes: int) -> None:
    assert sharing.fitting(int(memory_gib * GIB), int(weights_gib * GIB), KV) == processes


def test_without_a_gpu_there_are_two_and_pools_keep_their_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "visible_gpu", lambda: None)
    monkeypatch.setattr(sharing.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert sharing.processes_at_once(tmp_path) == 2
    assert sharing.pool_settings() == {}
