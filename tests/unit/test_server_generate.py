"""``/generate``: SGLang's fields in, SGLang's shape out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_support import MAX_CONTEXT, Running, error_of, make_scheduler, running

from flashrec.request import ScoreSpace
from flashrec.server.config import ServerConfig
from flashrec.server.filters import filter_names

BEGIN, END = 262, 263


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    scheduler = make_scheduler(tmp_path_factory.mktemp("shop"))
    with running(scheduler, ServerConfig(port=0, max_prompts=4, max_body_bytes=1 << 20)) as server:
        yield server


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    scheduler = make_scheduler(tmp_path_factory.mktemp("free"), catalog=False)
    with running(scheduler, ServerConfig(port=0)) as server:
        yield server


def test_the_shape_is_that_of_sglang_s_sample(free: Running) -> None:
    """Keys and nesting of a real SGLang 0.5.21 answer; the leader's meta_info is the first beam's."""
    answer = free.post(
        "/generate",
        {
            "input_ids": [5, 6],
            "sampling_params": {"beam_width": 3, "n": 2, "max_new_tokens": 2, "temperature": 0},
            "rid": "r1",
        },
    ).json()
    assert set(answer) == {"text", "output_ids", "meta_info"}
    meta = answer["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 4, 16)
    first, second = meta["beam_results"]
    assert (first["output_ids"], first["text"]) == (answer["output_ids"], answer["text"])
    assert first["meta_info"] == {key: value for key, value in meta.items() if key != "beam_results"}
    assert second["output_ids"] == [66, 66]
    assert second["meta_info"]["sequence_score"] == -0.25
    assert second["meta_info"]["cumulative_logprob"] == -0.5
    request = free.scheduler.submitted[-1]
    assert (request.n, request.beam_width, request.max_tokens) == (2, 3, 2)
    assert request.semantics == "sglang"


def test_a_catalog_adds_sid_and_items(shop: Running) -> None:
    answer = shop.post("/generate", {"text": "hi", "sampling_params": {"n": 2}}).json()
    assert answer["text"] == "<s_a_0><s_b_0>"
    assert answer["output_ids"] == [256, 259, END]
    info = answer["meta_info"]
    assert info["sid"] == [0, 0]
    assert info["items"] == ["apple", "pear"]
    assert info["finish_reason"] == {"type": "stop", "matched": END}
    assert [beam["text"] for beam in info["beam_results"]] == ["<s_a_0><s_b_0>", "<s_a_0><s_b_2>"]


def test_text_is_tokenised_with_sid_tokens_kept_whole(shop: Running) -> None:
    shop.post("/generate", {"text": "A<s_a_1><s_b_2><|sid_end|>"})
    tokenizer = shop.scheduler.engine.tokenizer
    assert shop.scheduler.submitted[-1].input_ids == (*tokenizer("A").input_ids, 257, 261, END)


def test_every_sampling_field_reaches_the_request(shop: Running) -> None:
    params = {
        "n": 2,
        "beam_width": 5,
        "max_new_tokens": 3,
        "temperature": 0.5,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "sampling_seed": 7,
        "score_space": "children",
        "length_penalty": 0.5,
        "constrained": True,
        "exclude": ["plum", [1, 1], "<|sid_begin|><s_a_0><s_b_0><|sid_end|>", 42],
        "allow": [[0, 2]],
    }
    assert shop.post("/generate", {"input_ids": [1], "sampling_params": params}).status_code == 200
    request = shop.scheduler.submitted[-1]
    assert (request.n, request.beam_width, request.max_tokens) == (2, 5, 3)
    assert (request.temperature, request.seed, request.length_penalty) == (0.5, 7, 0.5)
    assert (request.stop_token_ids, request.ignore_eos, request.constrained) == ((1, 2), True, True)
    assert request.score_space is ScoreSpace.CHILDREN
    assert request.exclude_items == ("plum", "42")
    assert request.exclude_sids == ((1, 1), (0, 0))
    assert request.allow_sids == ((0, 2),)
    assert request.allow_items == ()


def test_lists_of_prompts_keep_order_and_ids(shop: Running) -> None:
    body = {
        "input_ids": [[1], [2, 3]],
        "sampling_params": [{"n": 1}, {"n": 2}],
        "rid": ["a", "b"],
    }
    first, second = shop.post("/generate", body).json()
    assert [answer["meta_info"]["id"] for answer in (first, second)] == ["a", "b"]
    assert [answer["meta_info"]["prompt_tokens"] for answer in (first, second)] == [1, 2]
    assert len(second["meta_info"]["beam_results"]) == 2
    (one,) = shop.post("/generate", {"text": ["x"]}).json()
    assert one["meta_info"]["prompt_tokens"] == 1
    prefixed = shop.post("/generate", {"text": ["x", "y"], "rid": "p"}).json()
    assert [answer["meta_info"]["id"] for answer in prefixed] == ["p_0", "p_1"]


def test_stream_is_server_sent_events(shop: Running) -> None:
    response = shop.post("/generate", {"text": "x", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(data.removeprefix("data: "))["text"] == "<s_a_0><s_b_0>"


def test_what_sglang_s_own_benchmark_sends_is_accepted(free: Running) -> None:
    """The payload of ``sglang.bench_serving`` 0.5.21 with its defaults."""
    body = {
        "text": "hello",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    assert free.post("/generate", body).status_code == 200


NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "stop": [],
    "regex": None,
    "logit_bias": {},
    "spaces_between_special_tokens": True,
}


def test_neutral_values_pass(shop: Running) -> None:
    assert shop.post("/generate", {"text": "x", "sampling_params": NEUTRAL}).status_code == 200


BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 65}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 3, "beam_width": 2}, "n"),
    ({"beam_width": 65}, "beam_width"),
    ({"beam_width": 0}, "beam_width"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": "0"}, "temperature"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"sampling_seed": -1}, "sampling_seed"),
    ({"top_p": 0.9}, "top_p"),
    ({"top_p": True}, "top_p"),
    ({"top_k": 50}, "top_k"),
    ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"stop": ["x"]}, "stop"),
    ({"regex": ".*"}, "regex"),
    ({"score_space": "logits"}, "score_space"),
    ({"length_penalty": 1e9}, "length_penalty"),
    ({"exclude": [[0, 7]]}, "exclude[0]"),
    ({"exclude": ["plum", [0, -1]]}, "exclude[1][1]"),
    ({"exclude": [None]}, "exclude[0]"),
    ({"exclude": ["unknown"]}, "exclude"),
    ({"beam_widht": 4}, "beam_widht"),
]


@pytest.mark.parametrize(("params", "field"), BAD_PARAMS, ids=[str(params)[:40] for params, _ in BAD_PARAMS])
def test_a_bad_parameter_is_named_and_not_queued(shop: Running, params: dict[str, Any], field: str) -> None:
    before = len(shop.scheduler.submitted)
    response = shop.post("/generate", {"input_ids": [1], "sampling_params": params})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == f"sampling_params.{field}"
    assert error["message"].startswith(f"sampling_params.{field}: ")
    assert "\n" not in error["message"]
    assert len(shop.scheduler.submitted) == before


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"{}", "text"),
    (b'{"text": "a", "input_ids": [1]}', "text"),
    (b'{"text": ""}', "text"),
    (b'{"text": 5}', "text"),
    (b'{"text": [1]}', "text"),
    (b'{"input_ids": []}', "input_ids"),
    (b'{"input_ids": [[]]}', "input_ids"),
    (b'{"input_ids": [265]}', "input_ids"),
    (b'{"input_ids": [1, -1]}', "input_ids[1]"),
    (b'{"input_ids": [1, true]}', "input_ids[1]"),
    (b'{"input_ids": [1, 2.0]}', "input_ids[1]"),
    (b'{"input_ids": [99999999999999999999]}', "input_ids[0]"),
    (b'{"input_ids": [[1], [2, "x"]]}', "input_ids[1][1]"),
    (b'{"input_ids": [[1], [265]]}', "input_ids[1]"),
    (b'{"input_ids": "1"}', "input_ids"),
    (b'{"input_ids": %a}' % ([1] * (MAX_CONTEXT + 1)), "input_ids"),
    (b'{"input_ids": [[1],[1],[1],[1],[1]]}', "input_ids"),
    (b'{"input_ids": [1], "sampling_params": 5}', "sampling_params"),
    (b'{"input_ids": [1], "sampling_params": [{}, {}]}', "sampling_params"),
    (b'{"input_ids": [1], "sampling_params": [{"n": 0}]}', "sampling_params[0].n"),
    (b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', "sampling_params.temperature"),
    (b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}', "sampling_params.temperature"),
    (
        b'{"input_ids": [1], "sampling_params": {"length_penalty": -Infinity}}',
        "sampling_params.length_penalty",
    ),
    (b'{"input_ids": [1], "rid": ["a", "b"]}', "rid"),
    (b'{"input_ids": [1], "return_logprob": true}', "return_logprob"),
    (b'{"input_ids": [1], "timeout": 0}', "timeout"),
    (b'{"input_ids": [1], "timeout": 1e6}', "timeout"),
    (b'{"input_ids": [1], "stream": 1}', "stream"),
    (b'{"input_ids": [1], "what": 1}', "what"),
    (b'{"input_ids": [1]', "body"),
    (b"", "body"),
    (b"null", "body"),
    (b"[]", "body"),
    (b'{"text": "\xff"}', "body"),
    (b'{"text": "\\ud800"}', "body"),
    (b"[" * 100_000, "body"),
    (b'{"input_ids": [1]} x', "body"),
]


@pytest.mark.parametrize(("body", "field"), BAD_BODIES, ids=[body[:60].decode("latin-1") for body, _ in BAD_BODIES])
def test_a_bad_body_is_named_and_not_queued(shop: Running, body: bytes, field: str) -> None:
    before = len(shop.scheduler.submitted)
    response = shop.raw("/generate", body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == field, error
    assert len(shop.scheduler.submitted) == before


def test_a_free_search_needs_a_length(free: Running) -> None:
    error = error_of(free.post("/generate", {"input_ids": [1]}))
    assert error["param"] == "sampling_params.max_new_tokens"


def test_codes_without_a_layout_are_refused(free: Running) -> None:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "allow": [[0, 0]]}}
    assert error_of(free.post("/generate", body))["param"] == "sampling_params.allow[0]"


def test_a_checkpoint_without_a_tokenizer_takes_ids_only(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path, catalog=False)
    tokenizer, scheduler.engine.tokenizer = scheduler.engine.tokenizer, None
    with running(scheduler, ServerConfig(port=0)) as server:
        error = error_of(server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}}))
        assert error["param"] == "text"
        scheduler.engine.tokenizer = tokenizer  # only the fake's own range check reads it
        answer = server.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}).json()
        assert (answer["text"], answer["output_ids"]) == ("", [65, 66])


def test_a_list_of_no_parameters_is_not_the_default_for_all(shop: Running) -> None:
    answer = shop.post("/generate", {"input_ids": [5, 6], "sampling_params": []})
    assert answer.status_code == 400
    assert "0 entries for 1 prompts" in answer.text


def test_a_filter_as_a_whole_has_the_client_s_name() -> None:
    assert filter_names("sampling_params.")["exclude"] == "sampling_params.exclude"
    assert filter_names()["allow"] == "allow"
