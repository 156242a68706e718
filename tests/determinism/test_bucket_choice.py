"""Which row buckets are tried, and how a wave of many rows is filled."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from random_shop import MakeTask

from flashrec import EngineConfig
from flashrec.models.config import ModelConfig
from flashrec.runtime.buffers import row_buckets
from flashrec_harness.determinism import bucket_runs
from flashrec_harness.determinism.judge import judge
from flashrec_harness.determinism.lab import MAX_REQUESTS, Lab
from flashrec_harness.determinism.records import ProcessReport
from flashrec_harness.determinism.worker import perform
from flashrec_harness.outcome import Outcome

MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=150_000,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position=40_960,
    tie_word_embeddings=True,
    eos_token_ids=(1,),
    fp8=False,
)
SIZES = [bucket.rows for bucket in row_buckets(8192, MAX_REQUESTS)]


def test_both_sides_of_every_switch_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: products stop being small after 384 rows (4,096 outputs: 64 tiles across) and after 512 (2,048
    outputs: 32 x 8 = 256 tiles, 32 x 10 at 640). Two query heads share a K/V head, so a tile is 32 rows, and contexts
    are split among programs up to 16 tiles, 512 rows: 33 programs share a head, and 17 tiles are more than half."""
    found = bucket_runs.beside_switches(SIZES, MODEL, itemsize=2)
    assert {384, 448, 512, 640} <= found
    assert max(found) == 640
    monkeypatch.setattr(bucket_runs, "programs", lambda kv_heads: 2048 // kv_heads)
    moved = bucket_runs.beside_switches(SIZES, MODEL, itemsize=2)
    assert {3840, 4096} <= moved, "twice 120 tiles, and twice 128, for 256 programs"


def test_no_bucket_is_left_out_between_two_that_differ() -> None:
    found = bucket_runs.beside_switches(SIZES, MODEL, itemsize=2)
    programs = {size: bucket_runs._programs(size, MODEL, 2) for size in SIZES}
    assert {programs[size] for size in found} == set(programs.values())
    assert all(programs[low] == programs[high] for low, high in pairwise(SIZES) if not {low, high} <= found)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The configuration that a GPU of the largest wave ``rows`` would have."""

    def config(task: object) -> EngineConfig:
        return EngineConfig(model_path=Path(task.model_path), device="cuda", max_rows=rows)  # type: ignore[attr-defined]

    monkeypatch.setattr(bucket_runs, "_config", config)


def test_a_gpu_tries_the_largest_bucket_and_a_cpu_says_that_it_does_not(
    make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task("buckets")
    small = [1, 2, 4, 8, 16, 32, 48, 64]
    assert bucket_runs.bucket_sizes(task) == small
    assert bucket_runs.bucket_scope(task) == "8 of 32 buckets, the largest 64 of 2048 rows"
    on_a_gpu(monkeypatch, 8192)
    sizes = bucket_runs.bucket_sizes(task)
    assert set(small) < set(sizes)
    # A vocabulary of 160 allows 80 beams: sixteen such requests are 1,280 rows.
    assert sizes[-1] == 1280
    assert bucket_runs.bucket_scope(task).startswith(f"{len(sizes)} of 48 buckets, the largest 1280 of 8192")
    assert {1279, 1280, 1281} <= set(bucket_runs.bucket_targets(task))


def test_nothing_is_asked_for_above_the_largest_wave(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, 1024)
    targets = bucket_runs.bucket_targets(make_task("buckets"))
    assert max(targets) == 1024
    assert 1023 in targets


@pytest.mark.parametrize(("rows", "widest"), [(8152, 1024), (8152, 600), (600, 100), (30, 1024), (8152, 10)])
def test_mates_fill_a_wave_with_widths_that_are_allowed(rows: int, widest: int, make_task: MakeTask) -> None:
    task = make_task("buckets")
    lab = Lab(task, ProcessReport(0, "0", 1, "cpu"))
    for seed in range(20):
        widths = [mate.n for mate in lab.mates(random.Random(seed), rows, most=15, widest=widest)]
        assert sum(widths) == rows
        assert 1 <= len(widths) <= 15
        assert max(widths) <= max(widest, -(-rows // 15))


def test_a_larger_bucket_is_run_and_missed_if_it_is_not(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task("buckets")
    task = replace(task, axes=("buckets",))
    monkeypatch.setattr(bucket_runs, "bucket_sizes", lambda _, **__: [64, 640])
    report = perform(task)
    (check, *_) = judge([report], [task])
    assert check.outcome is Outcome.PASS, check.reason
    assert report.witness["buckets"]["bucket 640"] >= 2
    monkeypatch.setattr(bucket_runs, "bucket_sizes", lambda _, **__: [64, 640, 768])
    (check, *_) = judge([report], [task])
    assert check.outcome is Outcome.INVALID
    assert "767 rows" in check.reason
