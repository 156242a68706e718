"""``/v1/recommend``: history to prompt, SIDs to items."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_support import Running, error_of, make_scheduler, running

from flashrec.errors import ConfigError
from flashrec.server.config import ServerConfig


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(make_scheduler(tmp_path_factory.mktemp("shop")), ServerConfig(port=0)) as server:
        yield server


def prompt_text(server: Running) -> str:
    request = server.scheduler.submitted[-1]
    return str(server.scheduler.engine.tokenizer.decode(request.input_ids))


def test_top_items_with_titles(shop: Running) -> None:
    answer = shop.post("/v1/recommend", {"history": ["kiwi"], "k": 3}).json()
    assert [(item["rank"], item["item_id"], item["title"]) for item in answer["items"]] == [
        (1, "apple", "Title of apple"),
        (2, "pear", "Title of pear"),
        (3, "plum", "Title of plum"),
    ]
    first = answer["items"][0]
    assert (first["score"], first["cumulative_logprob"]) == (-0.125, -0.375)
    assert (first["sid"], first["sid_text"]) == ([0, 0], "<s_a_0><s_b_0>")
    assert answer["items"][1]["score"] == -0.125
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


def test_the_default_prompt_is_what_the_harness_trains_with(shop: Running) -> None:
    from flashrec_harness.prompts import PromptBuilder

    engine = shop.scheduler.engine
    builder = PromptBuilder(engine.tokenizer, engine.layout, engine.catalog)
    shop.post("/v1/recommend", {"history": ["kiwi", "plum"]})
    assert shop.scheduler.submitted[-1].input_ids == builder.prompt(["kiwi", "plum"])


@pytest.mark.parametrize("entry", ["kiwi", [1, 1], "<s_a_1><s_b_1>", "<|sid_begin|><s_a_1><s_b_1><|sid_end|>"])
def test_a_history_entry_may_be_an_item_or_a_sid(shop: Running, entry: Any) -> None:
    shop.post("/v1/recommend", {"history": [entry]})
    assert "<|sid_begin|><s_a_1><s_b_1><|sid_end|>" in prompt_text(shop)


def test_a_number_stands_for_its_digits(shop: Running) -> None:
    shop.post("/v1/recommend", {"history": [42]})
    assert "<s_a_2><s_b_0>" in prompt_text(shop)


def test_history_and_filters_are_excluded_in_the_search(shop: Running) -> None:
    body = {"history": ["kiwi", [0, 2]], "exclude_history": True, "exclude": ["pear"], "allow": ["apple"]}
    assert shop.post("/v1/recommend", body).status_code == 200
    request = shop.scheduler.submitted[-1]
    assert request.exclude_items == ("pear", "kiwi")
    assert request.exclude_sids == ((0, 2),)
    assert request.allow_items == ("apple",)
    shop.post("/v1/recommend", {"history": ["kiwi"]})
    assert shop.scheduler.submitted[-1].exclude_items == ()


def test_a_withdrawn_sid_in_a_history_is_no_obstacle(shop: Running) -> None:
    """A code of its codebooks that the catalog does not hold (0, 1): prompts may name it, excluding it is moot."""
    body = {"history": [[0, 1], "kiwi", "<s_a_1><s_b_2>", [0, 2]], "exclude_history": True}
    assert shop.post("/v1/recommend", body).status_code == 200
    assert "<|sid_begin|><s_a_0><s_b_1><|sid_end|>" in prompt_text(shop)
    request = shop.scheduler.submitted[-1]
    assert request.exclude_items == ("kiwi",)
    assert request.exclude_sids == ((0, 2),)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "history"),
        ({"history": []}, "history"),
        ({"history": "kiwi"}, "history"),
        ({"history": ["kiwi", "nothing"]}, "history[1]"),
        ({"history": [[5, 5]]}, "history"),
        ({"history": [True]}, "history[0]"),
        ({"history": [1.5]}, "history[0]"),
        ({"history": ["kiwi"], "k": 0}, "k"),
        ({"history": ["kiwi"], "k": 65}, "k"),
        ({"history": ["kiwi"] * 200}, "history"),
        ({"history": ["kiwi"], "exclude_history": 1}, "exclude_history"),
        ({"history": ["kiwi"], "exclude": ["unknown"]}, "exclude"),
        ({"history": ["kiwi"], "user": "x"}, "user"),
    ],
)
def test_bad_fields_are_named(shop: Running, body: dict[str, Any], field: str) -> None:
    response = shop.post("/v1/recommend", body)
    assert response.status_code == 400, response.text
    assert str(error_of(response)["param"]).startswith(field)


def test_without_a_catalog_it_says_what_to_do(tmp_path: Path) -> None:
    with running(make_scheduler(tmp_path, catalog=False), ServerConfig(port=0)) as server:
        error = error_of(server.post("/v1/recommend", {"history": ["kiwi"]}))
        assert "--sid-vocab-file" in error["message"]


def test_a_template_of_one_s_own(tmp_path: Path) -> None:
    template = tmp_path / "prompt.jinja"
    template.write_text("{% for e in history %}{{ e.item }}={{ e.title }}={{ e.codes[0] }};{% endfor %}\n")
    config = ServerConfig(port=0, prompt_template=template)
    with running(make_scheduler(tmp_path), config) as server:
        server.post("/v1/recommend", {"history": ["kiwi", [0, 0]]})
        assert prompt_text(server) == "kiwi=Title of kiwi=1;apple=Title of apple=0;"


def test_a_template_that_fails_on_a_history_is_a_400(tmp_path: Path) -> None:
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ history[5].sid }}")
    with running(make_scheduler(tmp_path), ServerConfig(port=0, prompt_template=template)) as server:
        assert error_of(server.post("/v1/recommend", {"history": ["kiwi"]}))["param"] == "history"


@pytest.mark.parametrize("source", ["{{ history", "{% include 'x' %}{{ 1 / }}"])
def test_a_broken_template_stops_the_start(tmp_path: Path, source: str) -> None:
    from flashrec.server.app import create_app

    template = tmp_path / "prompt.jinja"
    template.write_text(source)
    with pytest.raises(ConfigError, match=r"prompt_template: .*prompt\.jinja"):
        create_app(make_scheduler(tmp_path), ServerConfig(port=0, prompt_template=template))


def test_a_template_cannot_reach_into_python(tmp_path: Path) -> None:
    template = tmp_path / "prompt.jinja"
    template.write_text("{{ history.__class__.__mro__ }}")
    with running(make_scheduler(tmp_path), ServerConfig(port=0, prompt_template=template)) as server:
        assert server.post("/v1/recommend", {"history": ["kiwi"]}).status_code == 400
