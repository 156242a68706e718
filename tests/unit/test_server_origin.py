"""Web pages of other origins: a browser sends their POSTs to a server on the reader's machine without asking."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from server_support import Running, error_of, make_scheduler, running

from flashrec.server.auth import foreign_page
from flashrec.server.config import ServerConfig


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("shop")
    with running(make_scheduler(directory), ServerConfig(port=0, profiler_dir=directory / "profiles")) as server:
        yield server


def posts(server: Running) -> list[str]:
    """Every path that takes a POST: an endpoint that is added later is attacked as well."""
    document = server.client.get("/openapi.json").json()
    return sorted(path for path, methods in document["paths"].items() if "post" in methods)


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://[bad"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "origin": "SELF"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_no_endpoint_takes_a_post_from_a_foreign_page(shop: Running, headers: dict[str, str]) -> None:
    sent = {name: value.replace("SELF", f"http://127.0.0.1:{shop.port}") for name, value in headers.items()}
    paths = posts(shop)
    assert {"/generate", "/flush_cache", "/start_profile", "/stop_profile"} <= set(paths)
    for path in paths:
        response = shop.client.post(path, headers=sent)
        assert (response.status_code, error_of(response)["code"]) == (403, "cross_origin"), path
        assert error_of(response)["type"] == "permission_error"
    assert shop.scheduler.flushes == 0
    assert shop.scheduler.engine.profiler.state == "idle"


def test_programs_and_pages_of_this_server_are_served(shop: Running) -> None:
    before = shop.scheduler.flushes
    for headers in (
        {},
        {"origin": f"http://127.0.0.1:{shop.port}"},
        {"sec-fetch-site": "same-origin", "origin": f"http://127.0.0.1:{shop.port}"},
        {"sec-fetch-site": "none"},
    ):
        assert shop.client.post("/flush_cache", headers=headers).status_code == 200
    assert shop.scheduler.flushes == before + 4


def test_a_page_may_look_at_what_changes_nothing(shop: Running) -> None:
    """The browser keeps the answer from it, since no ``Access-Control-Allow-Origin`` comes back."""
    response = shop.client.get("/health", headers={"sec-fetch-site": "cross-site", "origin": "https://evil.example"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control-")]


def test_a_preflight_is_not_granted(shop: Running) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    response = httpx.options(f"http://127.0.0.1:{shop.port}/generate", headers=asked)
    assert response.status_code == 405
    assert "access-control-allow-origin" not in response.headers


def test_the_origin_is_compared_with_the_host() -> None:
    assert not foreign_page({b"origin": b"https://Shop.example:8000", b"host": b"shop.example:8000"})
    assert foreign_page({b"origin": b"https://shop.example", b"host": b"shop.example:8000"})
    assert foreign_page({b"origin": b"https://shop.example"})
