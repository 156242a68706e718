"""OpenAI's endpoints: choices, extension fields, usage, streams, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_support import Running, error_of, make_scheduler, running

from flashrec.request import ScoreSpace
from flashrec.server.config import ServerConfig

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    scheduler = make_scheduler(tmp_path_factory.mktemp("shop"))
    with running(scheduler, ServerConfig(port=0, max_prompts=3)) as server:
        yield server


def events(text: str) -> list[dict[str, Any]]:
    *frames, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_chat_returns_ranked_choices(shop: Running) -> None:
    answer = shop.post("/v1/chat/completions", {"model": "shop-model", "messages": USER, "n": 3}).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "shop-model"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    first = answer["choices"][0]
    assert first["message"] == {"role": "assistant", "content": "<s_a_0><s_b_0>"}
    assert first["finish_reason"] == "stop"
    assert first["sglext"] == {
        "sequence_score": -0.125,
        "cumulative_logprob": -0.375,
        "output_ids": [256, 259, 263],
        "sid": [0, 0],
        "items": ["apple", "pear"],
        "catalog": "default@1",
    }
    prompt = len("[user]hi[assistant]")
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 9,
        "total_tokens": prompt + 9,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_the_chat_template_makes_the_prompt(shop: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert shop.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    tokenizer = shop.scheduler.engine.tokenizer
    prompt = shop.scheduler.submitted[-1].input_ids
    assert tokenizer.decode(prompt) == "[system]s[user]ab[assistant]"


def test_fewer_legal_sids_than_n(shop: Running) -> None:
    """S5: all legal ones, no padding."""
    answer = shop.post("/v1/chat/completions", {"messages": USER, "n": 50}).json()
    assert len(answer["choices"]) == 4


def test_chat_stream_sends_each_choice_and_the_usage_last(shop: Running) -> None:
    body = {"messages": USER, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    first, second, last = events(shop.post("/v1/chat/completions", body).text)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "<s_a_0><s_b_0>"}
    assert second["choices"][0]["index"] == 1
    assert second["usage"] is None
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    quiet = events(shop.post("/v1/chat/completions", {"messages": USER, "stream": True}).text)
    assert "usage" not in quiet[-1]


def test_completions_over_several_prompts_number_choices_through(shop: Running) -> None:
    answer = shop.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, "best_of": 2}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][2]["text"] == "<s_a_0><s_b_0>"
    assert answer["usage"]["prompt_tokens"] == 2
    assert shop.post("/v1/completions", {"prompt": [1, 2]}).json()["usage"]["prompt_tokens"] == 2
    assert shop.post("/v1/completions", {"prompt": [[1], [2, 3]]}).json()["usage"]["prompt_tokens"] == 3


def test_extension_fields_reach_the_request(shop: Running) -> None:
    body = {
        "prompt": "x",
        "n": 2,
        "beam_width": 6,
        "max_tokens": 3,
        "temperature": 0.7,
        "seed": 11,
        "length_penalty": 0.0,
        "score_space": "level",
        "stop_token_ids": [3],
        "exclude": ["kiwi"],
        "allow": ["apple", [1, 1]],
        "timeout": 5.0,
    }
    assert shop.post("/v1/completions", body).status_code == 200
    request = shop.scheduler.submitted[-1]
    assert (request.n, request.beam_width, request.max_tokens, request.seed) == (2, 6, 3, 11)
    assert (request.temperature, request.length_penalty) == (0.7, 0.0)
    assert request.score_space is ScoreSpace.LEVEL
    assert request.semantics == "transformers"
    assert request.exclude_items == ("kiwi",)
    assert (request.allow_items, request.allow_sids) == (("apple",), ((1, 1),))


def test_temperature_defaults_to_zero(shop: Running) -> None:
    shop.post("/v1/completions", {"prompt": "x"})
    assert shop.scheduler.submitted[-1].temperature == 0.0


def test_neutral_openai_values_pass(shop: Running) -> None:
    body = {
        "model": "default",
        "messages": USER,
        "top_p": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logprobs": False,
        "logit_bias": {},
        "stop": None,
        "user": "u-17",
        "response_format": {"type": "text"},
        "tools": [],
        "store": False,
    }
    assert shop.post("/v1/chat/completions", body).status_code == 200


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": 3, "beam_width": 2}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0.5}, "top_p"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stop": "x"}, "stop"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"allow": [[9, 9]]}, "allow[0]"),
    ({"seed": 2**63}, "seed"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("change", "field"), BAD, ids=[str(change)[:50] for change, _ in BAD])
def test_bad_chat_fields_are_named_and_not_queued(shop: Running, change: dict[str, Any], field: str) -> None:
    before = len(shop.scheduler.submitted)
    response = shop.post("/v1/chat/completions", {"messages": USER} | change)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field
    assert error_of(response)["type"] == "invalid_request_error"
    assert len(shop.scheduler.submitted) == before


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", "b", "c", "d"]}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
    ],
)
def test_bad_completion_fields(shop: Running, body: dict[str, Any], field: str) -> None:
    response = shop.post("/v1/completions", body)
    assert response.status_code == 400
    assert error_of(response)["param"] == field


def test_an_unknown_model_is_a_404(shop: Running) -> None:
    response = shop.post("/v1/completions", {"model": "gpt", "prompt": "x"})
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_the_official_client_works_unchanged(shop: Running) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{shop.port}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["shop-model"]
        chat = client.chat.completions.create(model="shop-model", messages=USER, n=2, temperature=0)
        assert chat.choices[1].message.content == "<s_a_0><s_b_2>"
        assert chat.choices[1].model_extra["sglext"]["items"] == ["plum"]
        assert chat.usage.prompt_tokens_details.cached_tokens == 16
        text = client.completions.create(
            model="shop-model", prompt="x", extra_body={"exclude": ["plum"], "score_space": "children"}
        )
        assert text.choices[0].text == "<s_a_0><s_b_0>"
        stream = client.chat.completions.create(
            model="shop-model", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert [chunk.choices[0].delta.content for chunk in chunks[:2]] == ["<s_a_0><s_b_0>", "<s_a_0><s_b_2>"]
        assert chunks[-1].usage.completion_tokens == 6
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.chat.completions.create(model="shop-model", messages=USER, top_p=0.5)
