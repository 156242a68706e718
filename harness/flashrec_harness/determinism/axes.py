"""The axes that must not change a bit. Each says what it varies and which counters prove that it did."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flashrec import Engine, EngineConfig, ScoreSpace
from flashrec.runtime.buffers import Bucket, bucket_of, row_buckets
from flashrec.runtime.scheduler import Scheduler
from flashrec_harness.determinism.lab import MAX_REQUESTS, AxisRun, Lab, Place
from flashrec_harness.determinism.task import Task

_WAIT_S = 120.0
_MAX_SPIN_CYCLES = 2_000_000


def _no_overrides(_: Task) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Axis:
    """One way in which two runs of a request may differ.

    The check called ``title`` is invalid unless every counter of ``proves`` and of ``covers`` is above zero, and
    fails if one of ``forbids`` is. ``overrides`` are engine settings; ``prepare`` changes the loaded engine
    before its first wave.
    """

    name: str
    title: str
    run: AxisRun
    proves: tuple[str, ...] = ("waves",)
    covers: Callable[[Task], tuple[str, ...]] = field(default=lambda _: ())
    forbids: tuple[str, ...] = ()
    overrides: Callable[[Task], Mapping[str, Any]] = field(default=_no_overrides)
    prepare: Callable[[Engine], None] | None = None
    needs_catalog: bool = False
    needs_gpu: bool = False


def _alone(lab: Lab, engine: Engine) -> None:
    """The first wave of each probe is its reference: on a GPU it must have been replayed from a graph."""
    replays = engine.stats()["graph_replays"]
    for probe in ("default", "width 1"):
        for turn in range(2):
            engine.flush_cache()
            lab.wave(engine, Place("alone", f"turn {turn}"), probe, [], lab.task.rng("alone", turn))
    lab.report.count("eager", "reference waves from graphs", engine.stats()["graph_replays"] - replays)


def _mixed(lab: Lab, engine: Engine) -> None:
    for run in range(lab.task.runs):
        rng = lab.task.rng("mixed", run)
        if rng.random() < 0.4:
            # Among cached prompts a wave's rows follow the hits; only among cold ones can the probe's come last.
            engine.flush_cache()
        mates = lab.mates(rng, 0 if rng.random() < 0.1 else rng.randint(1, lab.task.max_rows))
        lab.wave(engine, Place("mixed", f"wave {run}"), "default", mates, rng)


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


def _bucket_events(task: Task) -> tuple[str, ...]:
    return (*(f"bucket {size}" for size in bucket_sizes(task)), *(f"{rows} rows" for rows in bucket_targets(task)))


def _buckets(lab: Lab, engine: Engine) -> None:
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


def _cache(lab: Lab, engine: Engine) -> None:
    page = engine.config.page_tokens
    for turn in range(1 if lab.task.quick else 4):
        rng = lab.task.rng("cache", turn)
        engine.flush_cache()
        cold = lab.wave(engine, Place("cache", "cold"), "default", [], rng)
        warm = lab.wave(engine, Place("cache", "warm"), "default", lab.mates(rng, 20), rng)
        engine.flush_cache()
        prompt = lab.task.prompts[0]
        shared = prompt[: page * max(1, len(prompt) // page // 2)]
        engine.generate([lab.request((*shared, *lab.task.prompts[-1]), 2)])
        part = lab.wave(engine, Place("cache", "partly warm"), "default", [], rng)
        engine.flush_cache()
        engine.generate([lab.request((*prompt[: page - 1], prompt[page], *prompt[page:]), 2)])
        lab.wave(engine, Place("cache", "after a near twin"), "default", [], rng)
        lab.report.count("cache", "cold runs", cold.cached_tokens == 0)
        lab.report.count("cache", "warm runs", warm.cached_tokens > 0)
        lab.report.count("cache", "partly warm runs", 0 < part.cached_tokens < warm.cached_tokens)


def _cache_off(lab: Lab, engine: Engine) -> None:
    for turn in range(2):
        rng = lab.task.rng("cache off", turn)
        found = lab.wave(engine, Place("cache off", f"turn {turn}"), "default", lab.mates(rng, 10 * turn), rng)
        lab.report.count("cache off", "hits", found.cached_tokens)


def _chunks(lab: Lab, engine: Engine) -> None:
    for turn in range(3 if lab.task.quick else 8):
        rng = lab.task.rng("chunks", turn)
        engine.flush_cache()
        before = engine.profiler.forward_passes, engine.stats()["decode_passes"]
        lab.wave(engine, Place("chunks", f"turn {turn}"), "default", lab.mates(rng, 12 * turn), rng)
        passes = engine.profiler.forward_passes - before[0]
        prefill = passes - (engine.stats()["decode_passes"] - before[1])
        lab.report.count("chunks", "chunk boundaries", max(0, prefill - 1))


def _small_pool(task: Task) -> dict[str, Any]:
    """Room for the probe and one more of its length: whoever else comes evicts it."""
    page = EngineConfig(model_path=Path(task.model_path)).page_tokens
    pages = -(-(len(task.prompts[0]) + 1) // page)
    return {"kv_pool_tokens": 2 * pages * page}


def _eviction(lab: Lab, engine: Engine) -> None:
    for turn in range(3 if lab.task.quick else 8):
        rng = lab.task.rng("eviction", turn)
        lab.wave(engine, Place("eviction", "before"), "default", [], rng)
        full = lab.wave(engine, Place("eviction", "warm"), "default", [], rng).cached_tokens
        before = engine.stats()["evicted_pages"]
        for prompt in rng.sample(lab.task.prompts[1:], 4):
            engine.generate([lab.request(prompt, 3)])
        lab.report.count("eviction", "evicted pages", engine.stats()["evicted_pages"] - before)
        after = lab.wave(engine, Place("eviction", "after"), "default", lab.mates(rng, 4 * turn), rng)
        lab.report.count("eviction", "probe pages lost", after.cached_tokens < full)


def _spaces(lab: Lab, engine: Engine) -> None:
    for space in ScoreSpace:
        rng = lab.task.rng("spaces", space)
        engine.flush_cache()
        lab.wave(engine, Place("spaces", "alone"), space, [], rng)
        lab.wave(engine, Place("spaces", "same space"), space, lab.mates(rng, 30, score_space=space), rng)
        others = [mate for other in ScoreSpace for mate in lab.mates(rng, 8, score_space=other)]
        lab.wave(engine, Place("spaces", "all spaces"), space, others, rng)
        lab.report.count("spaces", space)


def _sampling(lab: Lab, engine: Engine) -> None:
    for turn in range(2 if lab.task.quick else 6):
        rng = lab.task.rng("sampling", turn)
        hot = lab.mates(rng, 20, temperature=rng.uniform(0.5, 1.5), seed=rng.randrange(2**31))
        lab.wave(engine, Place("sampling", "greedy beside sampled"), "default", hot, rng)
        lab.wave(engine, Place("sampling", "seeded alone"), "seeded", [], rng)
        lab.wave(engine, Place("sampling", "seeded among others"), "seeded", hot + lab.mates(rng, 9), rng)


def _filters(lab: Lab, engine: Engine) -> None:
    listed = {
        name: set(lab.probe(name, engine).allow_sids or lab.probe(name, engine).exclude_sids)
        for name in ("allow", "exclude")
    }
    for name, sids in listed.items():
        rng = lab.task.rng("filters", name)
        other = "exclude" if name == "allow" else "allow"
        for case, mates in (
            ("alone", []),
            ("beside unfiltered", lab.mates(rng, 20)),
            ("beside filtered", [lab.probe(other, engine), *lab.mates(rng, 9)]),
        ):
            result = lab.wave(engine, Place("filters", case), name, mates, rng)
            wrong = sum((beam.sid in sids) != (name == "allow") for beam in result.beams)
            lab.report.count("filters", "beams against their list", wrong)


def tie_codes(engine: Engine) -> None:
    """Give the codes of every codebook equal embeddings in pairs, so that candidates tie exactly."""
    assert engine.layout is not None
    with torch.inference_mode():
        head = engine.parts.model.lm_head()
        for book in engine.layout.codebooks:
            ids = torch.from_numpy(book.astype("int64")).sort().values.to(head.device)
            pairs = ids[: len(ids) // 2 * 2].view(-1, 2)
            head[pairs[:, 1]] = head[pairs[:, 0]]


def _ties(lab: Lab, engine: Engine) -> None:
    for turn in range(3 if lab.task.quick else 6):
        rng = lab.task.rng("ties", turn)
        result = lab.wave(engine, Place("ties", f"turn {turn}"), "tied", lab.mates(rng, 10 * turn), rng)
        scores = [beam.cumulative_logprob for beam in result.beams]
        lab.report.count("ties", "tied beams", len(scores) - len(set(scores)))


def _arrival(lab: Lab, engine: Engine) -> None:
    """The first burst waits for the scheduler to start, so that at least one wave is shared; the others trickle in."""
    scheduler = Scheduler(engine)
    try:
        for turn in range(3 if lab.task.quick else 8):
            rng = lab.task.rng("arrival", turn)
            requests = [replace(mate, rid=f"mate {number}") for number, mate in enumerate(lab.mates(rng, 40))]
            requests.append(replace(lab.probe("default", engine), rid="default"))
            rng.shuffle(requests)
            answers = {}
            for request in requests:
                answers[request.rid] = scheduler.submit(request)
                time.sleep(rng.choice((0.0, 0.0, 0.002, 0.02)))
            if turn == 0:
                scheduler.start()
            results = {rid: answer.result(_WAIT_S) for rid, answer in answers.items()}
            mine = replace(results["default"], rid="default")
            lab.observe(engine, Place("arrival", f"turn {turn}"), mine, rows=0, requests=len(requests), at=0)
            lab.report.count("arrival", "waves")
    finally:
        scheduler.close()


def _eager(lab: Lab, engine: Engine) -> None:
    for turn in range(4):
        rng = lab.task.rng("eager", turn)
        lab.wave(engine, Place("eager", f"turn {turn}"), "default", lab.mates(rng, 15 * turn), rng)
    stats = engine.stats()
    lab.report.count("eager", "eager waves", stats["eager_waves"])
    lab.report.count("eager", "graph replays", stats["graph_replays"])


@contextmanager
def spins(engine: Engine, rng: random.Random) -> Iterator[None]:
    """Random busy-waits on the device before every pass, on its stream and beside it.

    They move the device against the host: what the host overwrites too early, or reads before an event, shows.
    """
    beside = torch.cuda.Stream()
    told = engine.profiler.on_forward

    def on_forward(*arguments: Any) -> None:
        told(*arguments)
        if rng.random() < 0.7:
            torch.cuda._sleep(rng.randrange(_MAX_SPIN_CYCLES))
        with torch.cuda.stream(beside):
            torch.cuda._sleep(rng.randrange(_MAX_SPIN_CYCLES))

    with mock.patch.object(engine.profiler, "on_forward", on_forward):
        yield
    torch.cuda.synchronize()


def _jitter(lab: Lab, engine: Engine) -> None:
    for turn in range(5 if lab.task.quick else 15):
        rng = lab.task.rng("jitter", turn)
        with spins(engine, rng):
            lab.wave(engine, Place("jitter", f"turn {turn}"), "default", lab.mates(rng, rng.randint(0, 50)), rng)


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("alone", "same bits alone, every time", _alone),
        Axis("mixed", "same bits in mixed waves", _mixed),
        Axis("buckets", "same bits in every row bucket and one row either side", _buckets, covers=_bucket_events),
        Axis(
            "cache",
            "same bits from a cold, a warm and a partly warm cache",
            _cache,
            proves=("cold runs", "warm runs", "partly warm runs"),
        ),
        Axis(
            "spaces",
            "same bits in every score space, whatever the mates use",
            _spaces,
            proves=tuple(ScoreSpace),
            needs_catalog=True,
        ),
        Axis("sampling", "same bits beside sampled mates, and sampled with a seed", _sampling, needs_catalog=True),
        Axis(
            "filters",
            "same bits beside other filters, its own obeyed",
            _filters,
            forbids=("beams against their list",),
            needs_catalog=True,
        ),
        Axis("arrival", "same bits in any order and delay of arrival", _arrival),
        Axis("jitter", "same bits under random device spins", _jitter, needs_gpu=True),
        Axis(
            "cache off",
            "same bits without the radix cache",
            _cache_off,
            forbids=("hits",),
            overrides=lambda _: {"disable_radix_cache": True},
        ),
        Axis(
            "chunks",
            "same bits across prefill chunk boundaries",
            _chunks,
            proves=("waves", "chunk boundaries"),
            overrides=lambda _: {"max_prefill_tokens": 24},
        ),
        Axis(
            "eviction",
            "same bits after eviction",
            _eviction,
            proves=("evicted pages", "probe pages lost"),
            overrides=_small_pool,
        ),
        Axis(
            "ties",
            "same bits where scores tie exactly",
            _ties,
            proves=("waves", "tied beams"),
            overrides=lambda _: {"disable_cuda_graph": True},
            prepare=tie_codes,
            needs_catalog=True,
        ),
        Axis(
            "eager",
            "same bits from captured graphs and step by step",
            _eager,
            proves=("waves", "eager waves", "reference waves from graphs"),
            forbids=("graph replays",),
            overrides=lambda _: {"disable_cuda_graph": True},
            needs_gpu=True,
        ),
    )
}
"""In the order they run: those without overrides share one engine."""
