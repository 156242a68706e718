"""The axes that must not change a bit: what each is called, how it runs, and which counters prove that it did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashrec import Engine, ScoreSpace
from flashrec_harness.determinism import bucket_runs, catalog_runs, device_runs, runs
from flashrec_harness.determinism.lab import AxisRun
from flashrec_harness.determinism.task import Task


def _no_overrides(_: Task) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Axis:
    """One way in which two runs of a request may differ.

    The check called ``title`` is invalid unless every counter of ``proves`` and of ``covers`` is above zero, and
    fails if one of ``forbids`` is; ``scope`` tells its summary how much of what there is was tried. ``overrides``
    are engine settings; ``prepare`` changes the loaded engine before its first wave; ``scheduled`` says that its
    requests reach the engine through the scheduler.
    """

    name: str
    title: str
    run: AxisRun
    proves: tuple[str, ...] = ("waves",)
    covers: Callable[[Task], tuple[str, ...]] = field(default=lambda _: ())
    forbids: tuple[str, ...] = ()
    scope: Callable[[Task], str] = field(default=lambda _: "")
    overrides: Callable[[Task], Mapping[str, Any]] = field(default=_no_overrides)
    prepare: Callable[[Engine], None] | None = None
    scheduled: bool = False
    needs_catalog: bool = False
    needs_plain_weights: bool = False
    needs_gpu: bool = False


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("alone", "same bits alone, every time", runs.alone),
        Axis("mixed", "same bits in mixed waves", runs.mixed),
        Axis(
            "buckets",
            "same bits across row buckets and one row either side",
            bucket_runs.buckets,
            covers=bucket_runs.bucket_events,
            scope=bucket_runs.bucket_scope,
        ),
        Axis(
            "cache",
            "same bits from a cold, a warm and a partly warm cache",
            runs.cache,
            proves=("cold runs", "warm runs", "partly warm runs"),
        ),
        Axis(
            "spaces",
            "same bits in every score space, whatever the mates use",
            runs.spaces,
            proves=tuple(ScoreSpace),
            needs_catalog=True,
        ),
        Axis("sampling", "same bits beside sampled mates, and sampled with a seed", runs.sampling, needs_catalog=True),
        Axis(
            "filters",
            "same bits beside other filters, its own obeyed",
            runs.filters,
            forbids=("beams against their list",),
            needs_catalog=True,
        ),
        Axis(
            "catalogs",
            "same bits beside other catalogs, after a rollback and after a reload",
            catalog_runs.catalogs,
            proves=("waves", "reloads"),
            needs_catalog=True,
        ),
        Axis("arrival", "same bits in any order and delay of arrival", runs.arrival, scheduled=True),
        Axis(
            "cancelled",
            "same bits beside cancelled requests, which leave no page behind",
            runs.cancelled,
            proves=("waves", "cancelled in flight"),
            forbids=("leaked pages",),
            scheduled=True,
        ),
        Axis("jitter", "same bits under random device spins", device_runs.jitter, needs_gpu=True),
        Axis(
            "cache off",
            "same bits without the radix cache",
            runs.cache_off,
            forbids=("hits",),
            overrides=lambda _: {"disable_radix_cache": True},
        ),
        Axis(
            "fp8",
            "same bits in every row bucket with weights quantised to FP8",
            bucket_runs.quantised,
            proves=("waves", "engines with FP8 products"),
            overrides=lambda _: {"quantization": "fp8"},
            needs_plain_weights=True,
        ),
        Axis(
            "chunks",
            "same bits across prefill chunk boundaries",
            runs.chunks,
            proves=("waves", "chunk boundaries"),
            overrides=lambda _: {"max_prefill_tokens": 24},
        ),
        Axis(
            "eviction",
            "same bits after eviction",
            runs.eviction,
            proves=("evicted pages", "probe pages lost"),
            overrides=runs.small_pool,
        ),
        Axis(
            "ties",
            "same bits where scores tie exactly",
            runs.ties,
            proves=("waves", "tied beams"),
            overrides=lambda _: {"disable_cuda_graph": True},
            prepare=runs.tie_codes,
            needs_catalog=True,
        ),
        Axis(
            "eager",
            "same bits from captured graphs and step by step",
            device_runs.eager,
            proves=("waves", "eager waves", "reference waves from graphs"),
            forbids=("graph replays",),
            overrides=lambda _: {"disable_cuda_graph": True},
            needs_gpu=True,
        ),
    )
}
"""In the order they run: those without overrides share one engine."""
