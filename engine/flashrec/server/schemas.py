"""What every request body shares: strict types, neutral values, prompts, filters, search options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag
from pydantic_core import PydanticCustomError

MAX_TOKEN_ID = 2**31 - 1
MIN_TEMPERATURE = 1e-3

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = list[TokenId]
Count = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
LengthPenalty = Annotated[float, Field(ge=-16, le=16)]
ScoreSpaceName = Literal["vocab", "sid", "level", "children"]


class Body(BaseModel):
    """A request body: no unknown key, no number that is not finite, no conversion between types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def must_be(*neutral: JsonValue) -> AfterValidator:
    """Accept a field that this engine does not act on only with a value that asks for nothing.

    A list passes when each of its elements would: batch clients send one value per prompt.
    """

    def same(value: JsonValue, other: JsonValue) -> bool:
        return value == other and isinstance(value, bool) == isinstance(other, bool)

    def is_neutral(value: JsonValue) -> bool:
        if any(same(value, other) for other in neutral):
            return True
        return isinstance(value, list) and bool(value) and all(map(is_neutral, value))

    def check(value: JsonValue) -> JsonValue:
        if not is_neutral(value):
            wanted = " or ".join(orjson.dumps(other).decode() for other in neutral)
            raise PydanticCustomError("unsupported", "is not supported: omit it or send {wanted}", {"wanted": wanted})
        return value

    return AfterValidator(check)


Unused = Annotated[JsonValue, must_be(None)]
UnusedFlag = Annotated[JsonValue, must_be(None, False)]
UnusedZero = Annotated[JsonValue, must_be(None, 0)]
UnusedOne = Annotated[JsonValue, must_be(None, 1)]
UnusedTopK = Annotated[JsonValue, must_be(None, -1)]
UnusedList = Annotated[JsonValue, must_be(None, [])]
UnusedMap = Annotated[JsonValue, must_be(None, {})]


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise PydanticCustomError(
            "temperature", "must be 0 (beam search) or at least {least}", {"least": MIN_TEMPERATURE}
        )
    return value


Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_temperature)]


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    if isinstance(first, str):
        return "<texts>"
    return "<batch>" if isinstance(first, list) else "<ids>"


def _sid_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<item>"
    if isinstance(value, list):
        return "<codes>"
    return "<number>" if isinstance(value, int) and not isinstance(value, bool) else None


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[str], Tag("<texts>")]
    | Annotated[list[TokenIds], Tag("<batch>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of token ids, or a list of either",
    ),
]

TextPrompt = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<texts>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="text_type",
        custom_error_message="must be a string or a list of strings",
    ),
]

TokenPrompt = Annotated[
    Annotated[TokenIds, Tag("<ids>")] | Annotated[list[TokenIds], Tag("<batch>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="ids_type",
        custom_error_message="must be a list of token ids or a list of such lists",
    ),
]

ItemOrSid = Annotated[
    Annotated[str, Tag("<item>")]
    | Annotated[int, Tag("<number>")]
    | Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Tag("<codes>")],
    Discriminator(
        _sid_kind,
        custom_error_type="item_type",
        custom_error_message="must be an item id, a semantic ID's text, or its list of codes",
    ),
]
"""An item id (a string, or a number that stands for its digits), a SID's text, or its 0-based codes."""

UNION_TAGS = frozenset({"<text>", "<ids>", "<texts>", "<batch>", "<item>", "<number>", "<codes>", "<one>", "<many>"})
"""Parts of an error's location that name a branch of a union and mean nothing to a client."""


class Filters(Body):
    """What a search must not return, and what it is restricted to."""

    exclude: list[ItemOrSid] = Field(default_factory=list)
    allow: list[ItemOrSid] | None = None


class SearchOptions(Filters):
    """FlashRec's own fields, beside OpenAI's."""

    beam_width: Count | None = None
    temperature: Temperature | None = None
    length_penalty: LengthPenalty = 1.0
    score_space: ScoreSpaceName | None = None
    seed: Seed | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the request is answered 504."""
