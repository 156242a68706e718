"""Fields of SGLang's and OpenAI's requests that this engine has no use for.

Each passes with the values that ask for nothing, so that a client may send its defaults, and is refused with any
other: nothing that would change the answer is dropped in silence. A ``Label`` cannot change it and may be anything.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import JsonValue

from flashrec.server.schemas import Body, Neutral

Unused = Annotated[JsonValue, Neutral((None,))]
UnusedFlag = Annotated[JsonValue, Neutral((None, False))]
UnusedZero = Annotated[JsonValue, Neutral((None, 0))]
UnusedOne = Annotated[JsonValue, Neutral((None, 1))]
UnusedTopK = Annotated[JsonValue, Neutral((None, -1, 1 << 30))]
"""SGLang writes "all tokens" both ways."""
UnusedList = Annotated[JsonValue, Neutral((None, []))]
UnusedMap = Annotated[JsonValue, Neutral((None, {}))]
Label = JsonValue


class UnusedSampling(Body):
    """Both APIs' sampling fields."""

    top_p: UnusedOne = None
    top_k: UnusedTopK = None
    min_p: UnusedZero = None
    frequency_penalty: UnusedZero = None
    presence_penalty: UnusedZero = None
    repetition_penalty: UnusedOne = None
    logit_bias: UnusedMap = None
    stop: UnusedList = None
    stop_regex: UnusedList = None
    json_schema: Unused = None
    regex: Unused = None
    ebnf: Unused = None
    structural_tag: Unused = None
    custom_params: UnusedMap = None
    no_stop_trim: UnusedFlag = None


class UnusedSglangSampling(UnusedSampling):
    """What else SGLang's ``sampling_params`` may hold."""

    spaces_between_special_tokens: Annotated[JsonValue, Neutral((None, True))] = None
    min_new_tokens: UnusedZero = None
    stream_interval: UnusedOne = None


class UnusedRouting(Body):
    """SGLang's fields on every endpoint: adapters, sessions, and where a request runs."""

    lora_path: Unused = None
    session_id: Label = None
    session_params: UnusedMap = None
    custom_logit_processor: Unused = None
    return_hidden_states: UnusedFlag = None
    return_routed_experts: UnusedFlag = None
    routed_experts_start_len: UnusedZero = None
    bootstrap_host: Unused = None
    bootstrap_port: Unused = None
    bootstrap_room: Unused = None
    routed_dp_rank: Unused = None
    data_parallel_rank: Unused = None
    disagg_prefill_dp_rank: Unused = None
    extra_key: Unused = None
    cache_salt: Unused = None
    priority: UnusedZero = None
    custom_labels: Label = None


class UnusedGenerate(UnusedRouting):
    """SGLang's ``/generate`` beside ``sampling_params``."""

    input_embeds: Unused = None
    image_data: UnusedList = None
    video_data: UnusedList = None
    audio_data: UnusedList = None
    modalities: UnusedList = None
    return_logprob: UnusedFlag = None
    logprob_start_len: Annotated[JsonValue, Neutral((None, -1))] = None
    top_logprobs_num: UnusedZero = None
    token_ids_logprob: UnusedList = None
    return_text_in_logprobs: UnusedFlag = None
    return_sampling_mask: UnusedFlag = None
    return_prompt_token_ids: UnusedFlag = None
    return_entropy: UnusedFlag = None
    return_bytes: UnusedFlag = None
    lora_id: Unused = None
    background: UnusedFlag = None
    require_reasoning: UnusedFlag = None
    max_thinking_tokens: Unused = None
    routing_key: Label = None
    conversation_id: Label = None
    no_logs: Label = None
    log_metrics: Label = None


class UnusedCompletion(UnusedRouting, UnusedSampling):
    """OpenAI's and SGLang's fields of both completion endpoints."""

    user: Label = None
    rid: Label = None
    min_tokens: UnusedZero = None
    return_token_ids: UnusedFlag = None
    return_cached_tokens_details: UnusedFlag = None
    response_format: Annotated[JsonValue, Neutral((None, {"type": "text"}))] = None


class UnusedChat(UnusedCompletion):
    """The chat endpoint's."""

    logprobs: UnusedFlag = None
    top_logprobs: UnusedZero = None
    tools: UnusedList = None
    tool_choice: Annotated[JsonValue, Neutral((None, "none", "auto"))] = None
    parallel_tool_calls: Label = None
    functions: UnusedList = None
    function_call: Annotated[JsonValue, Neutral((None, "none", "auto"))] = None
    audio: Unused = None
    modalities: Annotated[JsonValue, Neutral((None, ["text"]))] = None
    moderation: Unused = None
    prediction: Unused = None
    web_search_options: Unused = None
    reasoning_effort: Annotated[JsonValue, Neutral((None, "none"))] = None
    verbosity: Annotated[JsonValue, Neutral((None, "medium"))] = None
    separate_reasoning: Label = None
    stream_reasoning: Label = None
    chat_template_kwargs: UnusedMap = None
    continue_final_message: UnusedFlag = None
    store: UnusedFlag = None
    metadata: UnusedMap = None
    service_tier: Annotated[JsonValue, Neutral((None, "auto", "default"))] = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_options: Unused = None
    prompt_cache_retention: Unused = None
