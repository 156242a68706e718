"""The OpenAPI document: what each endpoint takes and answers, its errors included.

The routes read and parse their bodies themselves (size and time limits, orjson, a thread for it), so FastAPI sees
neither; this module puts them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from flashrec.server.schemas import Body

_ERRORS = {
    400: "The body is malformed, or a field has a value that cannot be served; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Sent by a browser for a web page of another origin, or under a `Host` that this server does not serve.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    409: "Not in this state: a profile runs already, or a catalog is being loaded, or there is none to go back to.",
    413: "The body is too large.",
    415: "The body is not `application/json`.",
    500: "The engine failed on this request.",
    503: "Overloaded or shutting down; come back after `Retry-After` seconds.",
    504: "The request's deadline passed.",
}
_SEARCH = (400, 403, 404, 408, 413, 415, 500, 503, 504)
_CONTROL = (400, 403, 408, 409, 413, 415, 500, 503)
_READ = (403, 500, 503, 504)


class ErrorDetail(BaseModel):
    """``type`` is a class of failures, ``code`` the failure itself, ``param`` the field that is wrong."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "server_error",
        "model_output_error",
    ]
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Every answer that is not a 2xx."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


def describe(app: FastAPI, bodies: Mapping[str, type[Body]], *, needs_key: bool) -> None:
    """Complete ``app``'s document; ``bodies`` are the models of the paths that take a POST.

    Where a model has only defaults, no body asks for them; a search needs one. ``needs_key``: the server asks for an
    API key.
    """
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(original(), bodies, needs_key=needs_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], bodies: Mapping[str, type[Body]], *, needs_key: bool) -> dict[str, Any]:
    components = document.setdefault("components", {})
    models = [(model, "validation") for model in {*bodies.values(), ErrorAnswer}]
    _, definitions = models_json_schema(
        sorted(models, key=lambda entry: entry[0].__name__),  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    components.setdefault("schemas", {}).update(definitions["$defs"])
    codes = dict(_ERRORS)
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    else:
        del codes[401]
    answer = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
    components["responses"] = {f"Error{code}": {"description": text, "content": answer} for code, text in codes.items()}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            is_search = "search" in operation["tags"]
            if method == "post":
                needed = is_search or any(field.is_required() for field in bodies[path].model_fields.values())
                schema = {"$ref": f"#/components/schemas/{bodies[path].__name__}"}
                operation["requestBody"] = {"required": needed, "content": {"application/json": {"schema": schema}}}
            if is_search:
                operation["responses"]["200"]["content"]["text/event-stream"] = {}
            # FastAPI's own validation error: no route of this server leaves anything to it.
            operation["responses"].pop("422", None)
            expected = _SEARCH if is_search else _READ if method == "get" else _CONTROL
            for code in (*expected, *([401] if needs_key else [])):
                operation["responses"][str(code)] = {"$ref": f"#/components/responses/Error{code}"}
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    return document
