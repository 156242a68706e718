"""Catalogs change while the scheduler serves: whole answers, no wave behind two captures, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import ask, open_engine, write_catalog, write_shop

from flashrec import Engine, Request, ScoreSpace
from flashrec.errors import CaptureError, CatalogError, CatalogStateError, RequestError
from flashrec.runtime import stage as stage_module
from flashrec.runtime.member import WaveKey
from flashrec.runtime.scheduler import Scheduler
from flashrec.runtime.stage import DecodeStage, GraphKey
from flashrec.sid.cache import load_catalog_and_trie

PATIENCE_S = 20.0
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_shop(tmp_path_factory.mktemp("shop"))
    for seed in SEEDS:
        write_catalog(path / f"{seed}.json", seed)
    return path


@pytest.fixture
def engine(shop: Path) -> Iterator[Engine]:
    engine = open_engine(shop, queue_size=256, sid_vocab_file=shop / "1.json")
    yield engine
    engine.close()


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine)
    scheduler.start()
    yield scheduler
    scheduler.close()


def requests() -> list[Request]:
    return [
        ask(3 + index, seed=index, n=1 + index % 7, score_space=list(ScoreSpace)[index % 4], rid=str(index))
        for index in range(12)
    ]


def test_answers_under_load_are_those_of_the_revision_that_they_report(
    scheduler: Scheduler, engine: Engine, shop: Path
) -> None:
    """Five clients, and 40 changes meanwhile: loads, rollbacks, refusals, and a second name that comes and goes."""
    expected = {}
    for seed in SEEDS:
        one = open_engine(shop, sid_vocab_file=shop / f"{seed}.json")
        for request in requests():
            expected[seed, request.rid] = one.generate([request])[0].beams
        one.close()
    seed_of = {"default@1": 1}
    answers: list[tuple[Request, Any]] = []
    done = threading.Event()

    def client(number: int) -> None:
        rng = random.Random(number)
        while not done.is_set():
            request = rng.choice(requests())
            name = rng.choice([None, None, "second"])
            try:
                future = scheduler.submit(replace(request, catalog=name))
            except RequestError:
                if name is None:
                    raise
                continue
            answers.append((request, future.result(PATIENCE_S)))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in clients:
        thread.start()
    rng, second = random.Random(0), False
    try:
        for change in range(40):
            seed = rng.choice(SEEDS)
            if change % 4 == 3:
                scheduler.rollback_catalog("default")
            elif change % 4 == 2:
                with pytest.raises(CatalogError):
                    scheduler.load_catalog("default", shop / "missing.json")
                if second:
                    scheduler.drop_catalog("second")
                    second = False
                else:
                    place = scheduler.load_catalog("second", shop / f"{seed}.json")
                    seed_of[place.active.label], second = seed, True
            else:
                place = scheduler.load_catalog("default", shop / f"{seed}.json")
                seed_of[place.active.label] = seed
            time.sleep(0.01)
    finally:
        done.set()
        for thread in clients:
            thread.join(PATIENCE_S)
    del place
    for request, result in answers:
        assert result.beams == expected[seed_of[result.catalog], request.rid], result.catalog
    assert len({result.catalog for _, result in answers}) >= 10
    assert {result.catalog.partition("@")[0] for _, result in answers} == {"default", "second"}
    scheduler.flush_cache()
    engine.generate([ask(5)])
    living = {served.revision for served in engine.catalogs._living.values()}
    named = [one for place in engine.catalogs.places().values() for one in (place.active, place.standby) if one]
    assert living == {served.revision for served in named}
    assert {key.revision for key in engine.stage._programs} <= living
    engine.flush_cache()
    assert engine.stats()["free_pages"] == engine.stats()["usable_pages"]


def test_a_wave_that_waits_comes_before_the_next_call(
    scheduler: Scheduler, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two captures wait and so does a request: the request waits for one of them only."""
    order: list[str] = []
    entered, release = threading.Event(), threading.Event()
    real = engine.launch

    def launch(members: list[Any]) -> Any:
        order.append("wave")
        return real(members)

    def capture(name: str) -> None:
        order.append(name)
        entered.set()
        assert release.wait(PATIENCE_S)

    monkeypatch.setattr(engine, "launch", launch)
    callers = []
    for name in ("first", "second", "third"):
        callers.append(threading.Thread(target=scheduler._on_engine_thread, args=(lambda name=name: capture(name),)))
        callers[-1].start()
        assert entered.wait(PATIENCE_S)
    futures = [scheduler.submit(ask(5))]
    release.set()
    for thread in callers:
        thread.join(PATIENCE_S)
    futures[0].result(PATIENCE_S)
    assert order == ["first", "wave", "second", "third"]


def test_waves_go_on_while_a_catalog_is_read(scheduler: Scheduler, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading holds no turn; a second load is refused at once, and the switch comes after both."""
    entered, release = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        entered.set()
        assert release.wait(PATIENCE_S)
        return load_catalog_and_trie(*arguments, **options)

    monkeypatch.setattr("flashrec.runtime.catalogs.load_catalog_and_trie", slow)
    loader = threading.Thread(target=scheduler.load_catalog, args=("default", shop / "2.json"))
    loader.start()
    assert entered.wait(PATIENCE_S)
    assert scheduler.submit(ask(5)).result(PATIENCE_S).catalog == "default@1"
    with pytest.raises(CatalogStateError, match="another catalog is being loaded"):
        scheduler.load_catalog("default", shop / "3.json")
    release.set()
    loader.join(PATIENCE_S)
    assert scheduler.submit(ask(5)).result(PATIENCE_S).catalog == "default@2"


class FakeGraph:
    """Stands in for a captured program; ``fail_at`` makes one that cannot be captured."""

    made = itertools.count()
    fail_at = -1

    def __init__(self, run: Any, name: str, memory: Any) -> None:
        self.name = name
        if next(FakeGraph.made) == FakeGraph.fail_at:
            raise CaptureError(f"CUDA graph capture of {name} failed at x.py:1 (y): out of memory")


@pytest.fixture
def graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> DecodeStage:
    """The engine's stage as on a GPU, as far as the bookkeeping of graphs goes; no wave may run on it."""
    monkeypatch.setattr(DecodeStage, "uses_graphs", True)
    monkeypatch.setattr(stage_module, "CapturedProgram", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(FakeGraph, "made", itertools.count())
    monkeypatch.setattr(FakeGraph, "fail_at", -1)
    return engine.stage


def captured(stage: DecodeStage, revision: int) -> set[tuple[int, ScoreSpace, bool]]:
    return {(key.rows, key.wave.space, key.filtered) for key in stage._graphs if key.wave.revision == revision}


def test_a_new_revision_gets_the_graphs_that_the_old_one_had(engine: Engine, graphs: DecodeStage, shop: Path) -> None:
    turns: list[str] = []

    def turn(function: Any) -> Any:
        before = graphs.captured
        result = function()
        turns.append(f"{graphs.captured - before} captures")
        return result

    rows = [bucket.rows for bucket in graphs.buckets]
    usual = {(size, ScoreSpace.SID, False) for size in rows} | {(rows[0], ScoreSpace.SID, True)}
    engine.load_catalog("default", shop / "2.json", turn=turn)
    assert captured(graphs, 2) == usual
    assert turns.count("1 captures") == len(usual)
    assert "2 captures" not in turns
    sizes = [key.rows for key in graphs._graphs]
    assert sizes == sorted(sizes, reverse=True)
    graphs.capture(GraphKey(rows[2], WaveKey(True, ScoreSpace.CHILDREN, 3, 2), True))
    extra = (rows[2], ScoreSpace.CHILDREN, True)
    assert captured(graphs, 2) == usual | {extra}
    engine.load_catalog("default", shop / "3.json")
    assert captured(graphs, 3) == usual | {extra}
    engine.load_catalog("other", shop / "1.json")
    assert captured(graphs, 4) == usual
    engine.load_catalog("default", shop / "1.json")
    assert captured(graphs, 2) == set(), "two revisions ago"
    assert captured(graphs, 3) == captured(graphs, 5) == usual | {extra}


def test_what_was_held_past_the_last_wave_goes_before_the_next_catalog_is_read(
    engine: Engine, graphs: DecodeStage, shop: Path
) -> None:
    engine.load_catalog("default", shop / "2.json")
    held = engine.catalogs.find(None)
    for seed in (3, 1):
        engine.load_catalog("default", shop / f"{seed}.json")
    assert held is not None
    assert captured(graphs, held.revision) != set(), "a front's request may still ask for it"
    del held
    with pytest.raises(CatalogError):
        engine.load_catalog("default", shop / "missing.json")
    assert captured(graphs, 2) == set()


def test_filtered_programs_of_every_bucket_can_be_captured_ahead(
    engine: Engine, graphs: DecodeStage, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "config", graphs.config.model_copy(update={"capture_filters": True}))
    engine.load_catalog("default", shop / "2.json")
    rows = [bucket.rows for bucket in graphs.buckets]
    assert captured(graphs, 2) == {(size, ScoreSpace.SID, filtered) for size in rows for filtered in (False, True)}


def test_a_refused_catalog_gives_its_memory_back_at_once(
    scheduler: Scheduler, engine: Engine, graphs: DecodeStage, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the garbage collector comes round: the error has crossed threads and must not hold the revision."""
    monkeypatch.setattr(FakeGraph, "fail_at", 3)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CatalogError):
            scheduler.load_catalog("default", shop / "2.json")
        end = time.monotonic() + PATIENCE_S
        while sorted(engine.catalogs._living) != [1] and time.monotonic() < end:
            time.sleep(0.001)  # the engine thread may not have left its turn yet
        assert sorted(engine.catalogs._living) == [1]
    finally:
        gc.enable()


@pytest.mark.parametrize("fail_at", [0, 3])
def test_a_catalog_whose_graphs_do_not_fit_is_refused(
    engine: Engine, graphs: DecodeStage, shop: Path, fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.catalogs.places()
    monkeypatch.setattr(FakeGraph, "fail_at", fail_at)
    with pytest.raises(CatalogError, match=r"2.json: CUDA graph capture of .* out of memory"):
        engine.load_catalog("default", shop / "2.json")
    assert engine.catalogs.places() == before
    engine.load_catalog("default", shop / "3.json")
    assert captured(graphs, 2) == set()
    assert len(captured(graphs, 3)) == len(graphs.buckets) + 1
