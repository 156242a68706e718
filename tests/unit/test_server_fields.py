"""Every field that a client of SGLang or OpenAI may send: defaults pass, and what would change an answer is refused.

The fields are those of the ``openai`` package's own signatures, and of SGLang 0.5's request classes as sent by a client
that writes all its defaults out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from server_support import Running, error_of, make_scheduler, running

from flashrec.server.config import ServerConfig

CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "x"}]}
PLAIN: dict[str, Any] = {"model": "default", "prompt": "x"}
OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
"""Parameters of the client itself."""
SERVED = {
    "model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature", "seed", "stream",
    "stream_options", "best_of",
}  # fmt: skip
HARMLESS = {"user", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
"""Labels: no value of theirs changes an answer."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(make_scheduler(tmp_path_factory.mktemp("shop")), ServerConfig(port=0)) as server:
        yield server


def fields(create: Any) -> list[str]:
    return sorted(set(inspect.signature(create).parameters) - OWN)


@pytest.mark.parametrize(
    ("path", "base", "create"),
    [("/v1/chat/completions", CHAT, ChatCompletions.create), ("/v1/completions", PLAIN, Completions.create)],
    ids=["chat", "plain"],
)
def test_each_field_of_the_openai_package_is_known(shop: Running, path: str, base: dict[str, Any], create: Any) -> None:
    names = fields(create)
    assert {"temperature", "logit_bias", "stop"} <= set(names)
    empty = {name: None for name in names if name not in base}
    response = shop.post(path, base | empty)
    assert response.status_code == 200, response.text
    for name in sorted(set(names) - SERVED - HARMLESS):
        loud = shop.post(path, base | {name: "surely not neutral"})
        assert loud.status_code == 400, name
        assert error_of(loud)["param"] == name
    for name in HARMLESS & set(names):
        assert shop.post(path, base | {name: "anything"}).status_code == 200, name


LOUD: list[tuple[str, dict[str, Any], Any]] = [
    ("top_p", {}, 0.5), ("frequency_penalty", {}, 0.1), ("presence_penalty", {}, -0.1), ("logit_bias", {}, {"5": -100}),
    ("stop", {}, ["x"]), ("stop", {}, "x"), ("top_k", {}, 5), ("min_p", {}, 0.1), ("repetition_penalty", {}, 1.2),
    ("min_tokens", {}, 3), ("response_format", {}, {"type": "json_object"}), ("regex", {}, "a"), ("ebnf", {}, "a"),
    ("json_schema", {}, "{}"), ("cache_salt", {}, "mine"), ("extra_key", {}, "mine"), ("lora_path", {}, "a"),
    ("return_hidden_states", {}, True), ("session_params", {}, {"id": "1"}), ("custom_params", {}, {"a": 1}),
]  # fmt: skip
CHAT_ONLY: list[tuple[str, dict[str, Any], Any]] = [
    ("logprobs", {}, True), ("top_logprobs", {}, 2), ("tools", {}, [{"type": "function"}]),
    ("tool_choice", {}, "required"),
    ("functions", {}, [{"name": "f"}]), ("function_call", {}, {"name": "f"}), ("audio", {}, {"voice": "x"}),
    ("modalities", {}, ["text", "audio"]), ("prediction", {}, {"type": "content"}), ("reasoning_effort", {}, "high"),
    ("verbosity", {}, "low"), ("web_search_options", {}, {}), ("store", {}, True), ("metadata", {}, {"a": "b"}),
    ("service_tier", {}, "flex"), ("chat_template_kwargs", {}, {"enable_thinking": False}),
]  # fmt: skip
PLAIN_ONLY: list[tuple[str, dict[str, Any], Any]] = [
    ("logprobs", {}, 0), ("logprobs", {}, 3), ("echo", {}, True), ("suffix", {}, "x"), ("best_of", {"n": 2}, 3),
]  # fmt: skip
CASES = [("/v1/chat/completions", CHAT, *case) for case in LOUD + CHAT_ONLY]
CASES += [("/v1/completions", PLAIN, *case) for case in LOUD + PLAIN_ONLY]


@pytest.mark.parametrize(("path", "base", "name", "with_", "value"), CASES, ids=[f"{c[0][4:8]}-{c[2]}" for c in CASES])
def test_what_would_change_the_answer_is_refused(
    shop: Running, path: str, base: dict[str, Any], name: str, with_: dict[str, Any], value: Any
) -> None:
    before = len(shop.scheduler.submitted)
    response = shop.post(path, base | with_ | {name: value})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"].startswith(name)
    assert len(shop.scheduler.submitted) == before


SGLANG_SAMPLING: dict[str, Any] = {
    "max_new_tokens": 128, "stop": None, "stop_token_ids": None, "stop_regex": None, "temperature": 0.0, "top_p": 1.0,
    "top_k": 1 << 30, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0, "n": 1, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
    "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False,
    "custom_params": None, "stream_interval": None, "logit_bias": None, "sampling_seed": None, "beam_width": None,
}  # fmt: skip
SGLANG_REQUEST: dict[str, Any] = {
    "rid": None, "session_id": None, "input_embeds": None, "image_data": None, "video_data": None, "audio_data": None,
    "return_logprob": None, "logprob_start_len": None, "top_logprobs_num": None, "token_ids_logprob": None,
    "return_sampling_mask": None, "return_text_in_logprobs": False, "stream": False, "log_metrics": True,
    "return_hidden_states": False, "return_routed_experts": False, "routed_experts_start_len": 0, "modalities": None,
    "session_params": None, "lora_path": None, "lora_id": None, "custom_logit_processor": None, "bootstrap_host": None,
    "bootstrap_port": None, "bootstrap_room": None, "routed_dp_rank": None, "data_parallel_rank": None,
    "disagg_prefill_dp_rank": None, "routing_key": None, "conversation_id": None, "background": False,
    "require_reasoning": False, "max_thinking_tokens": None, "priority": None, "extra_key": None, "no_logs": False,
    "custom_labels": None, "return_bytes": False, "return_entropy": False, "return_prompt_token_ids": False,
    "cache_salt": None,
}  # fmt: skip


@pytest.mark.parametrize("batch", [False, True])
def test_an_sglang_client_may_send_all_its_defaults(shop: Running, batch: bool) -> None:
    """One prompt, and a batch whose fields are lists with one value for each prompt."""
    body = {"text": ["x", "y"] if batch else "x", "sampling_params": SGLANG_SAMPLING, **SGLANG_REQUEST}
    if batch:
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "lora_path", "custom_logit_processor"):
            body[name] = [body[name]] * 2
        body["sampling_params"] = [SGLANG_SAMPLING] * 2
    response = shop.post("/generate", body)
    assert response.status_code == 200, response.text
    nothing = dict.fromkeys(SGLANG_SAMPLING)
    assert shop.post("/generate", {"text": "x", "sampling_params": nothing}).status_code == 200
    request = shop.scheduler.submitted[-1]
    assert (request.n, request.temperature, request.ignore_eos, request.seed) == (1, 0.0, False, None)


SGLANG_LOUD: dict[str, Any] = {
    "input_embeds": [[0.5]], "image_data": "x.png", "video_data": "x", "audio_data": ["x"], "return_logprob": True,
    "logprob_start_len": 0, "top_logprobs_num": 1, "token_ids_logprob": [1], "return_sampling_mask": True,
    "return_text_in_logprobs": True, "return_hidden_states": True, "return_routed_experts": True, "lora_path": "a",
    "session_params": {"id": "1"}, "custom_logit_processor": "x", "bootstrap_room": 1, "routed_dp_rank": 1,
    "background": True, "require_reasoning": True, "max_thinking_tokens": 5, "priority": 1, "extra_key": "k",
    "return_bytes": True, "return_entropy": True, "return_prompt_token_ids": True, "cache_salt": "s",
    "modalities": ["image"], "lora_id": "a", "routed_experts_start_len": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", SGLANG_LOUD)
def test_what_sglang_would_act_on_and_this_engine_would_not_is_refused(shop: Running, name: str) -> None:
    for value in (SGLANG_LOUD[name], [SGLANG_LOUD[name], None]):
        response = shop.post("/generate", {"text": "x", name: value})
        assert (response.status_code, error_of(response)["param"]) == (400, name)


@pytest.mark.parametrize("name", sorted(set(SGLANG_SAMPLING) - {"temperature", "n", "beam_width", "max_new_tokens"}))
def test_a_sampling_field_with_a_wrong_or_loud_value_is_refused(shop: Running, name: str) -> None:
    response = shop.post("/generate", {"text": "x", "sampling_params": {name: "surely not neutral"}})
    assert (response.status_code, error_of(response)["param"]) == (400, f"sampling_params.{name}")


NOT_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400", "0x1", "1_0", "+1", "01", ".5", "nan"]


@pytest.mark.parametrize("text", NOT_NUMBERS)
@pytest.mark.parametrize("field", ["temperature", "timeout", "length_penalty", "n", "max_tokens", "seed"])
def test_what_is_no_finite_number_is_refused_in_every_numeric_field(shop: Running, field: str, text: str) -> None:
    body = b'{"prompt": "x", "%s": %s}' % (field.encode(), text.encode())
    response = shop.raw("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert error_of(response)["code"] in {"malformed_json", "invalid_value"}


def test_the_client_as_a_user_holds_it(shop: Running) -> None:
    """Chat with a developer message and text parts, completions, streams with usage, models, and an error's class."""
    import openai

    with OpenAI(base_url=f"http://127.0.0.1:{shop.port}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="shop-model",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ],
            n=2,
            temperature=0,
            user="u1",
        )
        assert [choice.message.content for choice in chat.choices] == ["<s_a_0><s_b_0>", "<s_a_0><s_b_2>"]
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len("[system]be brief[user]x[assistant]")
        stream = client.completions.create(
            model="shop-model", prompt="x", n=2, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = list(stream)
        assert [chunk.choices[0].text for chunk in chunks] == ["<s_a_0><s_b_0>", "<s_a_0><s_b_2>"]
        assert last.usage is not None
        assert [model.id for model in client.models.list()] == ["shop-model"]
        with pytest.raises(openai.BadRequestError, match="top_p: is not supported") as refused:
            client.completions.create(model="shop-model", prompt="x", top_p=0.5)
        assert refused.value.param == "top_p"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-9", prompt="x")


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/generate", {"txt": "x"}, "txt", "txt: unknown field; did you mean 'text'?"),
        (
            "/generate",
            {"text": "x", "sampling_params": {"beam_widht": 4}},
            "sampling_params.beam_widht",
            "sampling_params.beam_widht: unknown field; did you mean 'beam_width'?",
        ),
        ("/v1/chat/completions", CHAT | {"max_token": 4}, "max_token", "max_token: unknown field; did you mean"),
        ("/v1/recommend", {"history": ["kiwi"], "zzz": 1}, "zzz", "zzz: unknown field"),
    ],
)
def test_a_misspelt_field_is_told_what_it_may_be(
    shop: Running, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = shop.post(path, body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert error["message"].startswith(message)
    assert ("did you mean" in error["message"]) is ("did you mean" in message)
