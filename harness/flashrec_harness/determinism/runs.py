"""The waves of each axis that any device can run. A function runs its axis once and counts what proves it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flashrec import Engine, EngineConfig, ScoreSpace
from flashrec.runtime.flight import Flight
from flashrec.runtime.member import Member
from flashrec.runtime.scheduler import Scheduler
from flashrec_harness.determinism.lab import Lab, Place
from flashrec_harness.determinism.task import Task

_WAIT_S = 120.0


def alone(lab: Lab, engine: Engine) -> None:
    """The first wave of each probe is its reference: on a GPU it must have been replayed from a graph."""
    replays = engine.stats()["graph_replays"]
    for probe in ("default", "width 1"):
        for turn in range(2):
            engine.flush_cache()
            lab.wave(engine, Place("alone", f"turn {turn}"), probe, [], lab.task.rng("alone", turn))
    lab.report.count("eager", "reference waves from graphs", engine.stats()["graph_replays"] - replays)


def mixed(lab: Lab, engine: Engine) -> None:
    for run in range(lab.task.runs):
        rng = lab.task.rng("mixed", run)
        if rng.random() < 0.4:
            # Among cached prompts a wave's rows follow the hits; only among cold ones can the probe's come last.
            engine.flush_cache()
        mates = lab.mates(rng, 0 if rng.random() < 0.1 else rng.randint(1, lab.task.max_rows))
        lab.wave(engine, Place("mixed", f"wave {run}"), "default", mates, rng)


def cache(lab: Lab, engine: Engine) -> None:
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


def cache_off(lab: Lab, engine: Engine) -> None:
    for turn in range(2):
        rng = lab.task.rng("cache off", turn)
        found = lab.wave(engine, Place("cache off", f"turn {turn}"), "default", lab.mates(rng, 10 * turn), rng)
        lab.report.count("cache off", "hits", found.cached_tokens)


def chunks(lab: Lab, engine: Engine) -> None:
    for turn in range(3 if lab.task.quick else 8):
        rng = lab.task.rng("chunks", turn)
        engine.flush_cache()
        before = engine.profiler.forward_passes, engine.stats()["decode_passes"]
        lab.wave(engine, Place("chunks", f"turn {turn}"), "default", lab.mates(rng, 12 * turn), rng)
        passes = engine.profiler.forward_passes - before[0]
        prefill = passes - (engine.stats()["decode_passes"] - before[1])
        lab.report.count("chunks", "chunk boundaries", max(0, prefill - 1))


def small_pool(task: Task) -> dict[str, Any]:
    """Room for the probe and one more of its length: whoever else comes evicts it."""
    page = EngineConfig(model_path=Path(task.model_path)).page_tokens
    pages = -(-(len(task.prompts[0]) + 1) // page)
    return {"kv_pool_tokens": 2 * pages * page}


def eviction(lab: Lab, engine: Engine) -> None:
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


def spaces(lab: Lab, engine: Engine) -> None:
    for space in ScoreSpace:
        rng = lab.task.rng("spaces", space)
        engine.flush_cache()
        lab.wave(engine, Place("spaces", "alone"), space, [], rng)
        lab.wave(engine, Place("spaces", "same space"), space, lab.mates(rng, 30, score_space=space), rng)
        others = [mate for other in ScoreSpace for mate in lab.mates(rng, 8, score_space=other)]
        lab.wave(engine, Place("spaces", "all spaces"), space, others, rng)
        lab.report.count("spaces", space)


def sampling(lab: Lab, engine: Engine) -> None:
    for turn in range(2 if lab.task.quick else 6):
        rng = lab.task.rng("sampling", turn)
        hot = lab.mates(rng, 20, temperature=rng.uniform(0.5, 1.5), seed=rng.randrange(2**31))
        lab.wave(engine, Place("sampling", "greedy beside sampled"), "default", hot, rng)
        lab.wave(engine, Place("sampling", "seeded alone"), "seeded", [], rng)
        lab.wave(engine, Place("sampling", "seeded among others"), "seeded", hot + lab.mates(rng, 9), rng)


def filters(lab: Lab, engine: Engine) -> None:
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


def ties(lab: Lab, engine: Engine) -> None:
    for turn in range(3 if lab.task.quick else 6):
        rng = lab.task.rng("ties", turn)
        result = lab.wave(engine, Place("ties", f"turn {turn}"), "tied", lab.mates(rng, 10 * turn), rng)
        scores = [beam.cumulative_logprob for beam in result.beams]
        lab.report.count("ties", "tied beams", len(scores) - len(set(scores)))


def arrival(lab: Lab, engine: Engine) -> None:
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
            lab.observe(engine, Place("arrival", f"turn {turn}"), mine, requests, scheduled=True)
            lab.report.count("arrival", "waves")
    finally:
        scheduler.close()


def cancelled(lab: Lab, engine: Engine) -> None:
    """The clients of every other mate go away while their wave runs; no page may stay behind."""
    engine.flush_cache()
    scheduler, launch = Scheduler(engine), engine.launch

    def leaving(members: list[Member]) -> Flight:
        flight = launch(members)
        gone = [member.request.rid for member in members if member.request.rid.startswith("gone")]
        for rid in gone:
            scheduler.cancel(rid)
        lab.report.count("cancelled", "cancelled in flight", len(gone))
        return flight

    with mock.patch.object(engine, "launch", leaving):
        try:
            for turn in range(2 if lab.task.quick else 6):
                rng = lab.task.rng("cancelled", turn)
                names = (f"{('gone', 'stays')[number % 2]} {turn}.{number}" for number in itertools.count())
                requests = [replace(mate, rid=rid) for mate, rid in zip(lab.mates(rng, 40), names, strict=False)]
                requests.append(replace(lab.probe("default", engine), rid="default"))
                answers = [scheduler.submit(request) for request in requests]
                if turn == 0:
                    scheduler.start()
                mine = replace(answers[-1].result(_WAIT_S), rid="default")
                lab.observe(engine, Place("cancelled", f"turn {turn}"), mine, requests, scheduled=True)
                lab.report.count("cancelled", "waves")
        finally:
            scheduler.close()
    engine.flush_cache()
    stats = engine.stats()
    lab.report.count("cancelled", "leaked pages", stats["usable_pages"] - stats["free_pages"])
