"""Every failure as one JSON shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from flashrec.errors import (
    CaptureError,
    CatalogError,
    CatalogStateError,
    DeadlineError,
    EngineFault,
    NonFiniteError,
    QueueFullError,
    RequestError,
)
from flashrec.profiler import ProfilerStateError
from flashrec.server.schemas import UNION_TAGS

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}
_KIND_TYPES = {"non_finite": "model_output_error"}
"""Failures that their status says too little about: a ``server_error`` may be worth another try, these are not."""


@dataclass(eq=False)
class ApiError(Exception):
    """A failure as the client sees it. ``kind`` also counts it in ``/metrics``."""

    status: int
    kind: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    def response(self) -> Response:
        """The HTTP answer."""
        by_status = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        kind = _KIND_TYPES.get(self.kind, by_status)
        body = {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.kind}}
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return Response(orjson.dumps(body), self.status, headers, media_type="application/json")


def overloaded(retry_after_s: int, message: str) -> ApiError:
    """503: the client should come back."""
    return ApiError(503, "queue_full", message, retry_after_s=retry_after_s)


def as_api_error(error: BaseException, names: Mapping[str, str], retry_after_s: int) -> ApiError:
    """What the client is told about ``error``; ``names`` maps the engine's field names to the client's."""
    match error:
        case ApiError():
            return error
        case RequestError():
            field = renamed(error.field, names)
            return ApiError(400, "invalid_value", f"{field}: {error.message}", field)
        case QueueFullError():
            return overloaded(retry_after_s, str(error))
        case DeadlineError():
            return ApiError(504, "deadline_exceeded", str(error))
        case CatalogError():
            return ApiError(400, "invalid_catalog", f"file: {error}", "file")
        case CatalogStateError():
            return ApiError(409, "catalog_state", str(error))
        case ProfilerStateError():
            return ApiError(409, "profiler_state", str(error))
        case NonFiniteError():
            return ApiError(500, "non_finite", str(error))
        case CaptureError():
            return ApiError(500, "capture_failed", str(error))
        case EngineFault():
            return ApiError(500, "engine_fault", str(error))
        case _:
            return ApiError(500, "internal_error", "the server failed on this request; its log says why")


def renamed(field: str, names: Mapping[str, str]) -> str:
    """``input_ids[3]`` under the client's name for ``input_ids``."""
    head, bracket, rest = field.partition("[")
    return names.get(head, head) + bracket + rest


def from_validation(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """The first problem of a body, at a place as a client writes it: ``sampling_params.n``, ``prompt[2]``."""
    problems = error.errors(include_url=False, include_input=False)
    problem = problems[0]
    if problem["type"] == "json_invalid":
        return ApiError(400, "malformed_json", f"body: {problem['msg']}", "body")
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in UNION_TAGS:
            path += f".{part}" if path else part
    path = path[:200] or "body"
    message = problem["msg"] if problem["type"] != "extra_forbidden" else f"unknown field{_meant(path, model)}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ApiError(400, "invalid_value", f"{path}: {message}{more}", path)


def _meant(path: str, model: type[BaseModel]) -> str:
    """The field that an unknown one is a misspelling of, if one is close."""
    close = difflib.get_close_matches(path.rpartition(".")[2], _fields(model), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@functools.cache
def _fields(model: type[BaseModel]) -> tuple[str, ...]:
    """The names of all fields of a body, at every depth."""
    schema = model.model_json_schema()
    parts = (schema, *schema.get("$defs", {}).values())
    return tuple(dict.fromkeys(name for part in parts for name in part.get("properties", {})))
