"""Bad requests: each is refused by the field that is wrong, before anything runs (SPEC B1a, V4)."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import VOCAB, write_checkpoint

from flashrec import Engine, EngineConfig, Request, RequestError, ScoreSpace
from flashrec.assets import tiny_shop


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = write_checkpoint(tmp_path_factory.mktemp("free"))
    return Engine(EngineConfig(model_path=path, device="cpu", max_beam_width=40, max_rows=40, max_context=64))


@pytest.fixture(scope="module")
def shop() -> Engine:
    path = tiny_shop()
    return Engine(EngineConfig(model_path=path, sid_vocab_file=path / "catalog.json", device="cpu", max_context=128))


def test_a_request_crosses_a_pipe_whole_and_takes_another_name() -> None:
    """Both are written out by hand in the class: every field must be there."""
    values = {field.name: object() for field in fields(Request)}
    request = Request(**values)  # type: ignore[arg-type]
    assert request.named("b") == replace(request, rid="b")
    assert asdict(pickle.loads(pickle.dumps(Request(input_ids=(1, 2), n=3, allow_sids=((1, 2),), rid="a")))) == asdict(
        Request(input_ids=(1, 2), n=3, allow_sids=((1, 2),), rid="a")
    )


BAD_EVERYWHERE: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "at least 1, got 0"),
    ({"n": 3, "beam_width": 2}, "n", "cannot come from a beam_width of 2"),
    ({"beam_width": 0}, "beam_width", "at least 1"),
    ({"input_ids": ()}, "input_ids", "the prompt is empty"),
    ({"input_ids": (1, -1)}, "input_ids", "token id -1 at position 1 is outside 0"),
    ({"input_ids": (1, 10**9)}, "input_ids", "token id 1000000000 at position 1"),
    ({"input_ids": (1,) * 1000}, "input_ids", "above this engine's max_context"),
    ({"temperature": math.nan}, "temperature", "finite number"),
    ({"temperature": -1.0}, "temperature", "at least 0"),
    ({"temperature": 1e-9}, "temperature", "use 0 for no sampling"),
    ({"length_penalty": math.inf}, "length_penalty", "finite number"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"n": "3"}, "n", "must be an integer, got '3'"),
    ({"n": None}, "n", "must be an integer, got None"),
    ({"n": True}, "n", "must be an integer, got True"),
    ({"beam_width": 2.0}, "beam_width", "must be an integer, got 2.0"),
    ({"seed": "x"}, "seed", "must be an integer"),
    ({"max_tokens": [3]}, "max_tokens", "must be an integer"),
    ({"temperature": "0"}, "temperature", "must be a number, got '0'"),
    ({"length_penalty": None}, "length_penalty", "must be a number, got None"),
]


@pytest.mark.parametrize(("fields", "field", "message"), BAD_EVERYWHERE)
def test_bad_fields_with_and_without_a_catalog(
    free: Engine, shop: Engine, fields: dict[str, Any], field: str, message: str
) -> None:
    for engine, more in ((free, {"max_tokens": 3}), (shop, {})):
        with pytest.raises(RequestError, match=message) as caught:
            engine.prepare(Request(**({"input_ids": (1, 2)} | more | fields)))
        assert caught.value.field == field


def test_numbers_of_numpy_are_numbers(shop: Engine) -> None:
    shop.prepare(Request(input_ids=(1, 2), n=np.int64(2), seed=np.int32(1), temperature=np.float32(0.0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"n": 41}, "n", "above this engine's max_beam_width of 40"),
        ({"max_tokens": None}, "max_tokens", "is required"),
        ({"max_tokens": 0}, "max_tokens", "must be 1 .. 8"),
        ({"max_tokens": 9}, "max_tokens", "must be 1 .. 8"),
        ({"temperature": 1.0}, "temperature", "needs a catalog"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids", "outside 0"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "outside 0"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids", "65 token ids are above the limit of 64"),
        ({"score_space": ScoreSpace.SID}, "score_space", "needs a catalog"),
        ({"exclude_items": ("x",)}, "exclude_items", "needs a catalog"),
        ({"allow_sids": ()}, "allow_sids", "needs a catalog"),
        ({"constrained": True}, "constrained", "no catalog"),
    ],
)
def test_bad_fields_without_a_catalog(free: Engine, fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        free.prepare(Request(**({"input_ids": (1, 2), "max_tokens": 3} | fields)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"n": 5000}, "n", "max_beam_width"),
        ({"max_tokens": 3}, "max_tokens", "less than a semantic ID of this catalog, 4 tokens"),
        ({"exclude_items": ("no-such-item",)}, "exclude_items", "no-such-item"),
        ({"stop_token_ids": (10**8,)}, "stop_token_ids", "outside 0"),
        ({"exclude_sids": ((0, 0),)}, "exclude_sids", "has 2 codes"),
        ({"allow_sids": ((10**6, 0, 0),)}, "allow_sids", "not in the catalog"),
    ],
)
def test_bad_fields_with_a_catalog(shop: Engine, fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        shop.prepare(Request(**({"input_ids": (1, 2)} | fields)))
    assert caught.value.field == field


def test_a_stop_token_inside_semantic_ids_is_refused_and_another_changes_nothing(shop: Engine) -> None:
    """``SGLang`` clients send the tokenizer's end tokens with every request."""
    assert shop.layout is not None
    code = int(shop.layout.sid_tokens[7])
    with pytest.raises(RequestError, match=f"token id {code} is part of semantic IDs") as caught:
        shop.prepare(Request(input_ids=(5, 6), stop_token_ids=(1, code)))
    assert caught.value.field == "stop_token_ids"
    plain, stopping = (shop.generate([(5, 6)], n=4, stop_token_ids=ids)[0] for ids in ((), (1, shop.layout.end)))
    assert plain.beams == stopping.beams


def test_begin_token_is_appended_once(shop: Engine) -> None:
    assert shop.layout is not None
    begin = shop.layout.begin
    without, with_begin = shop.prepare(Request(input_ids=(5, 6))), shop.prepare(Request(input_ids=(5, 6, begin)))
    assert without.tokens.tolist() == with_begin.tokens.tolist() == [5, 6, begin]


def test_longer_max_tokens_is_the_length_of_a_semantic_id(shop: Engine) -> None:
    short, long = (shop.generate([(5, 6)], n=4, max_tokens=tokens)[0] for tokens in (4, 100))
    assert short.beams == long.beams
    assert {beam.finish_reason for beam in long.beams} == {"stop"}


def test_excluding_one_item_of_a_shared_sid_keeps_the_sid(shop: Engine) -> None:
    catalog_file = json.loads((tiny_shop() / "catalog.json").read_text())
    shared = {key: items for key, items in catalog_file.items() if isinstance(items, list) and len(items) > 1}
    if not shared:
        pytest.skip("the bundled catalog has no SID with two items")
    key, items = next(iter(shared.items()))
    sid = tuple(map(int, key.split(",")))
    (one,) = shop.generate([(5, 6)], n=1, allow_sids=(sid,), exclude_items=(items[0],))
    assert one.beams[0].sid == sid
    assert one.beams[0].items == tuple(items[1:])
    (none,) = shop.generate([(5, 6)], n=1, allow_sids=(sid,), exclude_items=tuple(items))
    assert none.beams == ()
