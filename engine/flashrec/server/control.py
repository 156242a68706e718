"""What the endpoints beside the searches share: how they read their bodies and write their answers."""

from __future__ import annotations

from typing import TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from flashrec.server.bodies import read_body
from flashrec.server.context import Context
from flashrec.server.errors import from_validation
from flashrec.server.schemas import Body

B = TypeVar("B", bound=Body)


def json_response(payload: object) -> Response:
    """JSON through orjson; paths, enums and keys that are numbers as strings."""
    return Response(orjson.dumps(payload, default=str, option=orjson.OPT_NON_STR_KEYS), media_type="application/json")


async def control_body(context: Context, http: HttpRequest, model: type[B]) -> B:
    """A control endpoint's body; an empty one asks for the defaults."""
    context.lifecycle.check_ready(context.config.retry_after_s)
    raw = await read_body(http, context.config.max_body_bytes, context.config.body_timeout_s)
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise from_validation(error, model) from None
