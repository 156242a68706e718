"""Levels with one way on for every prefix, and packed catalogs of another base: what loading a catalog settles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import CATALOG, CODES, ask, open_engine, write_shop

from flashrec import Engine, ScoreSpace
from flashrec.errors import ConfigError
from flashrec.runtime.decode import CatalogProgram
from flashrec.search.levels import Level


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_shop(tmp_path)


def rewrite(shop: Path, change: Any) -> None:
    """Let ``change`` map every SID of the catalog; of those that become one the first stays."""
    entries = json.loads((shop / CATALOG).read_text())
    kept: dict[str, Any] = {}
    for key, items in entries.items():
        kept.setdefault(change(tuple(map(int, key.split(",")))), items)
    (shop / CATALOG).write_text(json.dumps(kept))


def joined(*codes: int) -> str:
    return ",".join(map(str, codes))


def searched(engine: Engine, **fields: Any) -> list[Any]:
    requests = [ask(7, n=20, **fields), ask(3, n=2, seed=5, **fields), ask(9, n=9, seed=6, **fields)]
    return [
        [(beam.sid, beam.cumulative_logprob, beam.score) for beam in one.beams] for one in engine.generate(requests)
    ]


@pytest.mark.parametrize(
    ("last", "space", "passes"),
    [
        ("one for all", ScoreSpace.CHILDREN, 1),
        ("one for each", ScoreSpace.CHILDREN, 1),
        ("one for all", ScoreSpace.SID, 2),
        ("several", ScoreSpace.CHILDREN, 2),
    ],
)
def test_a_last_level_without_a_choice_takes_no_pass(shop: Path, last: str, space: ScoreSpace, passes: int) -> None:
    change = {
        "one for all": lambda sid: joined(*sid[:2], 4),
        "one for each": lambda sid: joined(*sid[:2], (sid[0] + 5 * sid[1]) % CODES),
        "several": lambda sid: joined(*sid),
    }[last]
    rewrite(shop, change)
    engine = open_engine(shop, score_space=space)
    assert engine.stage.passes(engine.prepare(ask(7)).key) == passes
    before = engine.stats()["decode_passes"]
    searched(engine)
    assert engine.stats()["decode_passes"] - before == passes * (engine.stats()["waves"])


def test_what_is_settled_has_the_bits_of_what_is_computed(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(shop, lambda sid: joined(*sid[:2], (sid[0] + 5 * sid[1]) % CODES))
    settled = searched(open_engine(shop, score_space=ScoreSpace.CHILDREN))
    monkeypatch.setattr(Level, "settled", False)
    computing = open_engine(shop, score_space=ScoreSpace.CHILDREN)
    assert computing.stage.passes(computing.prepare(ask(7)).key) == 2
    assert searched(computing) == settled


def test_a_catalog_of_one_sid_is_settled_at_once(shop: Path) -> None:
    (shop / CATALOG).write_text('{"3,1,4": ["only"]}')
    engine = open_engine(shop, score_space=ScoreSpace.CHILDREN)
    assert engine.stage.passes(engine.prepare(ask(7)).key) == 0
    assert searched(engine) == [[((3, 1, 4), 0.0, 0.0)]] * 3


def test_a_level_in_the_middle_still_takes_its_pass(shop: Path) -> None:
    """Its token's keys and values are what the next level attends to."""
    rewrite(shop, lambda sid: joined(sid[0], 7, sid[2]))
    engine = open_engine(shop, score_space=ScoreSpace.CHILDREN)
    program = engine.stage.program(engine.prepare(ask(7)).key)
    assert isinstance(program, CatalogProgram)
    assert [level.settled for level in program.levels] == [False, True, False]
    assert program.passes == 2


def test_packed_keys_of_another_base_and_depth(shop: Path) -> None:
    """Base 50: ``(a * 50 + b) * 50 + c``. Without the flag such keys are codes of one level, or OpenOneRec's."""
    plain = searched(open_engine(shop))
    rewrite(shop, lambda sid: str((sid[0] * 50 + sid[1]) * 50 + sid[2]))
    engine = open_engine(shop, sid_packed="50,3")
    assert searched(engine) == plain
    engine.load_catalog("other", shop / CATALOG)
    assert searched(engine, catalog="other") == plain


@pytest.mark.parametrize("wrong", ["8192", "8192,", "1,3", "50,0", "50,17", "a,b", "50,3,1"])
def test_a_packing_that_is_none_is_refused(shop: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"sid_packed: .* is not BASE,DEPTH"):
        open_engine(shop, sid_packed=wrong)


def test_a_packing_needs_a_catalog(shop: Path) -> None:
    with pytest.raises(ConfigError, match="sid_packed: needs sid_vocab_file"):
        open_engine(shop, catalog=False, sid_packed="50,3")
