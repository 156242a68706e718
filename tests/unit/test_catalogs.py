"""Several catalogs in one engine: reload, rollback, what a request is answered from, and what is left afterwards."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import ask, open_engine, write_catalog, write_shop

from flashrec import Engine, Request, RequestError, Result, ScoreSpace
from flashrec.errors import CatalogError, CatalogStateError, ConfigError


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_shop(tmp_path_factory.mktemp("shop"))
    for seed in (1, 2, 3):
        write_catalog(path / f"{seed}.json", seed)
    return path


@pytest.fixture
def engine(shop: Path) -> Iterator[Engine]:
    engine = open_engine(shop)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(shop: Path) -> Iterator[dict[int, Engine]]:
    """One engine per catalog, which has never known another."""
    engines = {}
    for seed in (1, 2, 3):
        engines[seed] = open_engine(shop, sid_vocab_file=shop / f"{seed}.json", catalog=False)
    yield engines
    for engine in engines.values():
        engine.close()


def search(engine: Engine, request: Request) -> Result:
    (result,) = engine.generate([request])
    return result


def state(engine: Engine) -> Any:
    """Everything that a refused change must leave as it was."""
    stage = engine.stage
    places = {name: (place.active, place.standby) for name, place in engine.catalogs.places().items()}
    pages = engine.stats()["free_pages"] + engine.stats()["cached_pages"]
    return places, pages, sorted(stage._programs, key=repr), sorted(stage._graphs, key=repr)


def test_an_answer_comes_from_the_catalog_that_was_asked_for(
    engine: Engine, alone: dict[int, Engine], shop: Path
) -> None:
    for seed in (1, 2):
        engine.load_catalog(f"c{seed}", shop / f"{seed}.json")
    request = ask(9, n=8)
    default = search(engine, request).beams
    for seed in (1, 2):
        named = ask(9, n=8, catalog=f"c{seed}")
        found = search(engine, named)
        assert found.beams == search(alone[seed], request).beams
        assert {item.partition("-")[0] for beam in found.beams for item in beam.items} == {f"seed{seed}"}
        assert found.catalog == f"c{seed}@{seed + 1}"
    assert search(engine, request).beams == default
    assert search(engine, request).catalog == "default@1"


def test_one_stream_of_requests_over_several_catalogs(engine: Engine, alone: dict[int, Engine], shop: Path) -> None:
    """Waves of different catalogs follow each other; none is mixed, and the prefix cache serves them all."""
    engine.load_catalog("default", shop / "1.json")
    engine.load_catalog("second", shop / "2.json")
    engine.load_catalog("third", shop / "3.json")
    names = {1: "default", 2: "second", 3: "third"}
    rng = random.Random(5)
    seeds = [rng.choice((1, 2, 3)) for _ in range(40)]
    length = [rng.randint(1, 30) for _ in seeds]
    space = [rng.choice(list(ScoreSpace)) for _ in seeds]
    fields = [{"n": 1 + index % 9, "seed": index % 7, "score_space": space[index]} for index in range(40)]
    waves = engine.counters.waves
    results = engine.generate(
        [ask(length[i], catalog=names[seed], **fields[i]) for i, seed in enumerate(seeds)]  # type: ignore[arg-type]
    )
    assert 3 <= engine.counters.waves - waves < 40
    for i, seed in enumerate(seeds):
        expected = search(alone[seed], ask(length[i], **fields[i]))  # type: ignore[arg-type]
        assert results[i].beams == expected.beams
    repeat = ask(30, seed=50, n=2)
    assert search(engine, repeat).cached_tokens == 0
    assert search(engine, ask(30, seed=50, n=2, catalog="second")).cached_tokens == 28


def test_filters_act_in_the_catalog_that_was_asked_for(engine: Engine, alone: dict[int, Engine], shop: Path) -> None:
    """A wave's filters of one catalog leave nothing behind for those of the next, which numbers its SIDs anew."""
    engine.load_catalog("c1", shop / "1.json")
    engine.load_catalog("c2", shop / "2.json")
    for seed in (1, 2, 1):
        first = search(alone[seed], ask(7, n=4)).beams
        fields: dict[str, Any] = {"n": 6, "exclude_sids": tuple(beam.sid for beam in first if beam.sid)}
        found = search(engine, ask(7, catalog=f"c{seed}", **fields))
        assert found.beams == search(alone[seed], ask(7, **fields)).beams
        assert not {beam.sid for beam in found.beams} & {beam.sid for beam in first}
        only = tuple(item for beam in first[:2] for item in beam.items)
        narrow = search(engine, ask(7, n=6, catalog=f"c{seed}", allow_items=only))
        assert {item for beam in narrow.beams for item in beam.items} == set(only)
    best = [beam.sid for beam in search(alone[2], ask(7, n=30)).beams if beam.sid]
    wave = [ask(7, n=5, exclude_sids=tuple(best[:3])), ask(7, n=5, allow_sids=tuple(best[3:9])), ask(7, n=5)]
    together = engine.generate([replace(request, catalog="c2") for request in wave])
    assert [result.beams for result in together] == [search(alone[2], request).beams for request in wave]
    with pytest.raises(RequestError, match=r"exclude_items: no item 'seed1-0'"):
        engine.prepare(ask(7, catalog="c2", exclude_items=("seed1-0",)))


def test_a_reload_replaces_and_a_rollback_restores_the_bits(
    engine: Engine, alone: dict[int, Engine], shop: Path
) -> None:
    request = ask(12, n=9)
    before = search(engine, request)
    engine.load_catalog("default", shop / "1.json")
    after = search(engine, request)
    assert after.beams == search(alone[1], request).beams != before.beams
    assert (before.catalog, after.catalog) == ("default@1", "default@2")
    place = engine.rollback_catalog("default")
    assert (place.active.label, place.standby and place.standby.label) == ("default@1", "default@2")
    restored = search(engine, request)
    assert (restored.beams, restored.catalog) == (before.beams, "default@1")
    engine.rollback_catalog("default")
    assert search(engine, request).beams == after.beams


def test_a_catalog_on_standby_answers_only_by_its_label(engine: Engine, alone: dict[int, Engine], shop: Path) -> None:
    request = ask(12, n=9)
    before = search(engine, request).beams
    place = engine.load_catalog("default", shop / "3.json", activate=False)
    assert place.standby is not None
    assert search(engine, request).beams == before
    assert search(engine, ask(12, n=9, catalog=place.standby.label)).beams == search(alone[3], request).beams
    engine.rollback_catalog("default")
    assert search(engine, request).beams == search(alone[3], request).beams


def test_a_request_is_answered_from_the_revision_it_was_prepared_with(engine: Engine, shop: Path) -> None:
    """Prepared, then two reloads and, in flight, a third: tokens, items and label are those of then."""
    request = ask(9, n=8, rid="early")
    before = search(engine, request)
    member = engine.prepare(request)
    engine.load_catalog("default", shop / "1.json")
    engine.load_catalog("default", shop / "2.json")
    (admitted,) = engine.admission.admit([member])
    flight = engine.launch([admitted])
    engine.load_catalog("default", shop / "3.json")
    (result,) = engine.finish(flight)
    assert isinstance(result, Result)
    assert (result.beams, result.catalog) == (before.beams, "default@1")


def test_a_revision_goes_when_nobody_needs_it(engine: Engine, shop: Path) -> None:
    first = engine.catalogs.find(None)
    assert first is not None
    watched = weakref.ref(first)
    held = engine.prepare(ask(9, n=8))
    kept = search(engine, ask(5))
    del first
    engine.load_catalog("default", shop / "1.json")
    engine.load_catalog("default", shop / "2.json")
    assert watched() is not None, "a request still waits for it"
    assert any(key.revision == 1 for key in engine.stage._programs)
    del held
    assert watched() is None, "results keep the host's part of a catalog only"
    engine.generate([ask(5)])
    assert {key.revision for key in engine.stage._programs} == {3}
    assert kept.beams[0].items[0].startswith("item"), "a result is rendered from the catalog that it came from"


def test_fifty_reloads_leave_what_one_leaves(engine: Engine, shop: Path) -> None:
    def reload(seed: int) -> None:
        engine.load_catalog("default", shop / f"{seed}.json")
        engine.generate([ask(9, n=4, seed=seed), ask(6, n=2, exclude_items=(f"seed{seed}-0",))])
        engine.flush_cache()

    engine.generate([ask(9)])
    for seed in (1, 2, 3):
        reload(seed)
    gc.collect()
    sizes = (
        len(engine.stage._programs),
        len(engine.stage._buffers),
        len(engine.catalogs._living),
        engine.stats()["free_pages"],
    )
    for index in range(50):
        reload(1 + index % 3)
    assert sizes == (
        len(engine.stage._programs),
        len(engine.stage._buffers),
        len(engine.catalogs._living),
        engine.stats()["free_pages"],
    )
    assert engine.stats()["free_pages"] == engine.stats()["usable_pages"]
    assert engine.catalogs.places()["default"].active.revision == 54


WRONG = {
    "depth.json": ('{"1,2": "x"}', r"depth.json: row 1: 2 codes per SID, but the layout has 3 levels"),
    "code.json": ('{"1,2,3": "x", "1,2,12": "y"}', r"code.json: row 2: level 2 has codes 0 to 11, not 12"),
    "broken.json": ('{"1,2', r"broken.json: .*"),
    "empty.json": ("", r"empty.json: the catalog is empty"),
}


@pytest.mark.parametrize("name", [*WRONG, "missing.json"])
def test_a_wrong_catalog_is_refused_and_changes_nothing(engine: Engine, shop: Path, name: str) -> None:
    text, message = WRONG.get(name, ("", r"missing.json: cannot read the catalog: No such file"))
    if text or name == "empty.json":
        (shop / name).write_text(text)
    engine.load_catalog("other", shop / "1.json")
    request = ask(9, n=8)
    before, answers = state(engine), [search(engine, request).beams, search(engine, ask(9, catalog="other")).beams]
    for place in ("default", "other", "new"):
        with pytest.raises(CatalogError, match=message):
            engine.load_catalog(place, shop / name)
    gc.collect()
    assert state(engine)[:2] == before[:2]
    assert [search(engine, request).beams, search(engine, ask(9, catalog="other")).beams] == answers


def test_the_size_of_a_catalog_is_that_of_its_tensors(shop: Path) -> None:
    for fields in ({}, {"dense_trie_cells": 0}, {"score_end": True}):
        engine = open_engine(shop, **fields)
        served = engine.catalogs.places()["default"].active
        tensors = [entry for level in served.tries for entry in level if isinstance(entry, torch.Tensor)]
        real = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())
        assert real <= served.device_bytes <= 1.5 * real
        engine.close()


def test_names_are_checked_and_counted(shop: Path) -> None:
    engine = open_engine(shop, max_catalogs=2)
    for name in ("", "a b", "../x", "a@1", "x" * 65, "-x"):
        with pytest.raises(RequestError, match="name: must be letters"):
            engine.load_catalog(name, shop / "1.json")
    engine.load_catalog("second", shop / "1.json")
    with pytest.raises(RequestError, match="name: 'third' would be one catalog more than max_catalogs, 2"):
        engine.load_catalog("third", shop / "2.json")
    engine.load_catalog("second", shop / "2.json")
    engine.drop_catalog("second")
    engine.load_catalog("third", shop / "3.json")
    engine.close()


def test_a_catalog_beyond_the_budget_is_refused(shop: Path) -> None:
    """The budget counts what a rollback needs; what went gives its room back."""
    size = open_engine(shop).catalogs.places()["default"].active.device_bytes
    engine = open_engine(shop, catalog_bytes=3 * size)
    engine.load_catalog("default", shop / "1.json")
    engine.load_catalog("default", shop / "2.json")
    engine.load_catalog("spring", shop / "1.json")
    with pytest.raises(CatalogError, match=r"3.json: [\d,]+ bytes on the device beside [\d,]+ .* above catalog_bytes"):
        engine.load_catalog("second", shop / "3.json")
    assert list(engine.catalogs.places()) == ["default", "spring"]
    engine.drop_catalog("spring")
    engine.load_catalog("default", shop / "3.json")
    engine.close()
    with pytest.raises(CatalogError, match="catalog_bytes"):
        open_engine(shop, catalog_bytes=size // 2)


def test_what_is_not_there_is_said(engine: Engine, shop: Path) -> None:
    engine.load_catalog("spring", shop / "1.json")
    for wanted in ("autumn", "spring@1", "spring@9", "default@", "@1", "spring@2@2", ""):
        with pytest.raises(RequestError, match=r"catalog: .* is not served here; served are 'default', 'spring'"):
            engine.prepare(ask(5, catalog=wanted))
    with pytest.raises(RequestError, match="catalog: contradicts constrained"):
        engine.prepare(ask(5, constrained=False, max_tokens=2, catalog="spring"))
    with pytest.raises(CatalogStateError, match="'spring': there is no other revision"):
        engine.rollback_catalog("spring")
    for change in (engine.rollback_catalog, engine.drop_catalog):
        with pytest.raises(RequestError, match="name: 'autumn' is not served here"):
            change("autumn")
    with pytest.raises(RequestError, match="name: 'default' answers requests that name no catalog"):
        engine.drop_catalog("default")
    with pytest.raises(RequestError, match="activate: 'new' is a new name"):
        engine.load_catalog("new", shop / "2.json", activate=False)


def test_a_dropped_catalog_still_answers_who_waits(engine: Engine, shop: Path) -> None:
    engine.load_catalog("spring", shop / "1.json")
    before = search(engine, ask(9, n=4, catalog="spring")).beams
    waiting = engine.prepare(ask(9, n=4, catalog="spring"))
    engine.drop_catalog("spring")
    with pytest.raises(RequestError, match="is not served here"):
        engine.prepare(ask(9, n=4, catalog="spring"))
    (outcome,) = engine.run_wave(engine.admission.admit([waiting]))
    assert isinstance(outcome, Result)
    assert outcome.beams == before


def test_an_engine_without_a_catalog_takes_none(shop: Path) -> None:
    engine = open_engine(shop, catalog=False)
    with pytest.raises(CatalogStateError, match="started without a catalog"):
        engine.load_catalog("default", shop / "1.json")
    with pytest.raises(RequestError, match="catalog: 'x' is not served here; this engine was started without"):
        engine.prepare(ask(5, catalog="x", max_tokens=2))
    assert search(engine, ask(5, max_tokens=2)).catalog is None
    engine.close()
    with pytest.raises(ConfigError, match="max_catalogs"):
        open_engine(shop, max_catalogs=0)
