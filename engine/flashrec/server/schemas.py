"""What every request body shares: strict types, neutral values, prompts, filters, search options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    Tag,
    WithJsonSchema,
)
from pydantic.config import JsonDict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_TOKEN_ID = 2**31 - 1
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 100.0

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = list[TokenId]
Count = Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
LengthPenalty = Annotated[float, Field(ge=-16, le=16)]
CatalogName = Annotated[str, Field(max_length=100)]
"""A served catalog's name, or the ``name@revision`` that an answer reported."""
ScoreSpaceName = Literal["vocab", "sid", "level", "children"]


class Body(BaseModel):
    """A request body: no unknown key, no number that is not finite, no conversion between types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True, eq=False)
class Neutral:
    """Accepts a field that this engine does not act on only with a value that asks for nothing.

    A list passes when each of its elements would: batch clients send one value per prompt. Not equal to another,
    or ``typing`` would take ``Neutral((0,))`` for ``Neutral((False,))``.
    """

    values: tuple[JsonValue, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        one = {"enum": list(self.values)}
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}

    def _holds(self, value: JsonValue) -> bool:
        # JSON's true is not 1.
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.values)

    def _check(self, value: JsonValue) -> JsonValue:
        if not self._holds(value) and not (isinstance(value, list) and value and all(map(self._holds, value))):
            wanted = " or ".join(orjson.dumps(other).decode() for other in self.values)
            raise PydanticCustomError("unsupported", "is not supported: omit it or send {wanted}", {"wanted": wanted})
        return value


def _temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise PydanticCustomError(
            "temperature", "must be 0 (beam search) or at least {least}", {"least": MIN_TEMPERATURE}
        )
    return value


Temperature = Annotated[
    float,
    Field(ge=0, le=MAX_TEMPERATURE),
    AfterValidator(_temperature),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "const": 0},
                {"type": "number", "minimum": MIN_TEMPERATURE, "maximum": MAX_TEMPERATURE},
            ]
        }
    ),
]


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


_TEXT: JsonDict = {"type": "string", "minLength": 1}
_IDS: JsonDict = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID},
    "minItems": 1,
}
_Text = Annotated[str, Tag("<text>"), WithJsonSchema(_TEXT)]
_Ids = Annotated[TokenIds, Tag("<ids>"), WithJsonSchema(_IDS)]
_Texts = Annotated[list[str], Tag("<texts>"), WithJsonSchema({"type": "array", "items": _TEXT, "minItems": 1})]
_Batch = Annotated[list[TokenIds], Tag("<batch>"), WithJsonSchema({"type": "array", "items": _IDS, "minItems": 1})]
"""The document says that a prompt is not empty; the engine refuses one, with a message of its own."""

Prompt = Annotated[
    _Text | _Ids | _Texts | _Batch,
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of token ids, or a list of either",
    ),
]

_text_type = Discriminator(
    _prompt_kind,
    custom_error_type="text_type",
    custom_error_message="must be a string or a list of strings",
)
TextPrompt = Annotated[_Text | _Texts, _text_type]
Name = Annotated[Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<texts>")], _text_type]
"""A text of the client's own, or one for each prompt."""

TokenPrompt = Annotated[
    _Ids | _Batch,
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
    catalog: CatalogName | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the request is answered 504."""
