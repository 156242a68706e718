"""Waves that try every row bucket and one row either side of it."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from flashrec import Engine, EngineConfig
from flashrec.runtime.buffers import Bucket, bucket_of, row_buckets
from flashrec_harness.determinism.lab import MAX_REQUESTS, Lab, Place
from flashrec_harness.determinism.task import Task


def _all_buckets(task: Task) -> list[Bucket]:
    return row_buckets(EngineConfig(model_path=Path(task.model_path)).rows_per_wave, MAX_REQUESTS)


def bucket_sizes(task: Task) -> list[int]:
    """The row buckets up to the task's limit."""
    return [bucket.rows for bucket in _all_buckets(task) if bucket.rows <= task.max_rows]


def bucket_targets(task: Task) -> list[int]:
    """Rows of the waves that try every bucket up to the task's limit, and one row either side of it.

    Each bucket is filled first, then used with the most padding, then with less: what the full wave left is
    then still there.
    """
    sizes = bucket_sizes(task)
    around = {rows for size in sizes for rows in (size - 1, size, size + 1) if rows > 0}
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
        mates = lab.mates(rng, rows - width, most=room)
        at = 0 if rows in sizes else len(mates)
        lab.wave(engine, Place("buckets", f"{rows} rows"), probe, mates, rng, at=at)
        lab.report.count("buckets", f"{rows} rows")
        for size, times in engine.stats()["buckets"].items():
            lab.report.count("buckets", f"bucket {size}", times - used.get(size, 0))
        if not room:
            lab.wave(engine, Place("buckets", f"{rows} rows, among mates"), probe, lab.mates(rng, 30), rng)
