"""Waves that try row buckets on both sides of every switch of programs, and one row either side of each."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from pathlib import Path

from flashrec import Engine, EngineConfig
from flashrec.kernels._triton import ceil_div
from flashrec.kernels.decode_work import programs
from flashrec.kernels.gemm_plan import is_small, plan_gemm
from flashrec.kernels.ops import UNUSED
from flashrec.kernels.tiles import rows_per_tile
from flashrec.models.config import ModelConfig, read_raw_config
from flashrec.models.registry import model_class
from flashrec.runtime.buffers import Bucket, bucket_of, row_buckets
from flashrec_harness.determinism.lab import MAX_REQUESTS, Lab, Place
from flashrec_harness.determinism.task import Task


def _config(task: Task) -> EngineConfig:
    return EngineConfig(model_path=Path(task.model_path))


def _all_buckets(task: Task) -> list[Bucket]:
    return row_buckets(_config(task).rows_per_wave, MAX_REQUESTS)


def _widest(config: EngineConfig, model: ModelConfig) -> int:
    """Beams that a request may have, in a search without a catalog too."""
    return min(config.max_beam_width, model.vocab_size // 2)


def _programs(rows: int, model: ModelConfig, itemsize: int) -> tuple[object, ...]:
    """What the engine launches for a bucket of ``rows`` on a GPU, where that is a matter of the bucket.

    The plan of each product that small tiles compute, and whether requests that fill the bucket and whose contexts are
    equally long have them split among decode attention's programs.
    """
    products = [plan_gemm(rows, outs, itemsize) if is_small(rows, outs) else None for outs, _ in model.projection_sizes]
    tiles = ceil_div(rows, rows_per_tile(model.num_heads, model.num_kv_heads))
    return (*products, 2 * tiles < programs(model.num_kv_heads))


def beside_switches(sizes: list[int], model: ModelConfig, itemsize: int) -> set[int]:
    """Of the ascending ``sizes`` each neighbouring two that run different programs."""
    return {
        size
        for pair in itertools.pairwise(sizes)
        if _programs(pair[0], model, itemsize) != _programs(pair[1], model, itemsize)
        for size in pair
    }


def bucket_sizes(task: Task, *, fp8: bool = False) -> list[int]:
    """The row buckets up to the task's limit; on a GPU those beside a switch of programs and the largest too.

    The largest is that of the widest requests that a wave of this suite can have. ``fp8``: of an engine that
    quantises the checkpoint's weights.
    """
    config, sizes = _config(task), [bucket.rows for bucket in _all_buckets(task)]
    chosen = {size for size in sizes if size <= task.max_rows}
    if config.torch_device.type == "cuda":
        raw = read_raw_config(config.model_path)
        model = model_class(raw).parse_config(raw, config.model_path)
        fillable = [size for size in sizes if size <= MAX_REQUESTS * _widest(config, model)]
        itemsize = 1 if fp8 or model.fp8 else config.compute_dtype.itemsize
        chosen |= beside_switches(fillable, model, itemsize) | {fillable[-1]}
    return sorted(chosen)


def bucket_scope(task: Task) -> str:
    """How many of the engine's buckets are tried."""
    sizes, every = bucket_sizes(task), _all_buckets(task)
    return f"{len(sizes)} of {len(every)} buckets, the largest {sizes[-1]} of {every[-1].rows} rows"


def bucket_targets(task: Task, *, fp8: bool = False) -> list[int]:
    """Rows of the waves that try the chosen buckets, and one row either side of each.

    Each bucket is filled first, then used with the most padding, then with less: what the full wave left is
    then still there.
    """
    sizes, most = bucket_sizes(task, fp8=fp8), _config(task).rows_per_wave
    around = {rows for size in sizes for rows in (size - 1, size, size + 1) if 0 < rows <= most}
    return sorted(around, key=lambda rows: (bisect_left(sizes, rows), rows not in sizes, rows))


def bucket_events(task: Task) -> tuple[str, ...]:
    return (*(f"bucket {size}" for size in bucket_sizes(task)), *(f"{rows} rows" for rows in bucket_targets(task)))


def buckets(lab: Lab, engine: Engine) -> None:
    """The probe stands first in a full bucket and last in the others: what the mates left lies right behind it.

    The smallest buckets hold one request: there the probe is as wide as the bucket, and is compared with itself
    among mates in a larger one.
    """
    task, buckets = lab.task, _all_buckets(lab.task)
    sizes = bucket_sizes(task)
    for rows in bucket_targets(task):
        rng, used = task.rng("buckets", rows), engine.stats()["buckets"]
        room = bucket_of(rows, 1, buckets).requests - 1
        width = task.width if rows >= task.width else 1 if room else rows
        probe = "default" if width == task.width else f"width {width}"
        engine.flush_cache()
        mates = lab.mates(rng, rows - width, most=room, widest=lab.widest(engine))
        at = 0 if rows in sizes else len(mates)
        lab.wave(engine, Place("buckets", f"{rows} rows"), probe, mates, rng, at=at)
        lab.report.count("buckets", f"{rows} rows")
        for size, times in engine.stats()["buckets"].items():
            lab.report.count("buckets", f"bucket {size}", times - used.get(size, 0))
        if not room:
            lab.wave(engine, Place("buckets", f"{rows} rows, among mates"), probe, lab.mates(rng, 30), rng)


def quantised(lab: Lab, engine: Engine) -> None:
    """The probe on weights quantised to FP8: alone first, then in every bucket that holds it, cold and warm in turn."""
    task, buckets = lab.task, _all_buckets(lab.task)
    used = engine.stats()["kernels"]["linear_fp8"] != UNUSED
    lab.report.count("fp8", "engines with FP8 products", used)
    lab.wave(engine, Place("fp8", "alone"), "quantised", [], task.rng("fp8"))
    for turn, rows in enumerate(rows for rows in bucket_targets(task, fp8=True) if rows >= task.width):
        rng, room = task.rng("fp8", rows), bucket_of(rows, 1, buckets).requests - 1
        if turn % 2 == 0:
            engine.flush_cache()
        mates = lab.mates(rng, rows - task.width, most=room, widest=lab.widest(engine))
        lab.wave(engine, Place("fp8", f"{rows} rows"), "quantised", mates, rng)
