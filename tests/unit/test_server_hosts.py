"""DNS rebinding: a page whose name now leads to this machine has an ``Origin`` that equals its ``Host``."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_support import Running, make_scheduler, running

from flashrec.cli import main
from flashrec.errors import ConfigError
from flashrec.server.config import ServerConfig
from flashrec.server.hosts import served_hosts

EVIL = "rebound.example"


def ask(server: Running, method: str, path: str, host: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON body (empty where there is none) of one request under a ``Host`` of our choice."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": host, "Content-Length": "0", **headers}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content.startswith(b"{") else {}
    finally:
        connection.close()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("shop")
    config = ServerConfig(port=0, profiler_dir=directory / "profiles", api_key="secret")
    with running(make_scheduler(directory), config) as server:
        yield server


def routes(server: Running) -> list[tuple[str, str]]:
    """Every method and path of the server's own document, so that one that is added later is attacked as well."""
    document = server.client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    return [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]


def test_no_endpoint_answers_under_a_rebound_name(shop: Running) -> None:
    """What the browser sends is the victim's own origin, so ``foreign_page`` has nothing to object to."""
    found = routes(shop)
    assert {("GET", "/health"), ("POST", "/generate"), ("GET", "/metrics"), ("POST", "/flush_cache")} <= set(found)
    host = f"{EVIL}:{shop.port}"
    for method, path in [*found, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nothing")]:
        for key in ({}, {"Authorization": "Bearer secret"}):
            page = {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
            status, body = ask(shop, method, path, host, **page, **key)
            assert (status, body["error"]["code"]) == (403, "host_not_allowed"), (method, path)
    assert shop.scheduler.flushes == 0
    assert shop.scheduler.submitted == []


def test_the_refusal_says_what_to_do(shop: Running) -> None:
    status, body = ask(shop, "GET", "/health", f"gpu7.corp:{shop.port}")
    assert (status, body["error"]["type"], body["error"]["param"]) == (403, "permission_error", "host")
    for part in ("'gpu7.corp'", "--allowed-host gpu7.corp", "localhost, 127.0.0.1, [::1]", "proxy", "port forward"):
        assert part in body["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "LocalHost", "localhost.", "localhost:80", "[::1]:9000", "127.0.0.1:1"]
)
def test_this_machine_s_own_names_are_answered_at_any_port(shop: Running, host: str) -> None:
    """Any port: a port forward keeps the name and changes the number."""
    assert ask(shop, "GET", "/health", host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "evil.example#localhost",
        "evil.example/localhost",
        "localhost@evil.example",
        "localhost:80@evil.example",
        "127.0.0.1.nip.example",
        "127.0.0.2",
        "0.0.0.0",
        "::1",
        "",
        ":80",
        "localhost:80:80",
        "localhost:x",
        "xlocalhost",
    ],
)
def test_what_only_looks_like_them_is_not(shop: Running, host: str) -> None:
    """403, or 400 where it is no ``Host`` that HTTP allows."""
    assert ask(shop, "GET", "/health", host)[0] in (400, 403)


def test_a_request_without_the_header_is_no_browser_s(shop: Running) -> None:
    """HTTP/1.0, as some balancers probe; HTTP/1.1 without the header is malformed."""
    for version, status in (("1.0", b"200"), ("1.1", b"400")):
        with socket.create_connection(("127.0.0.1", shop.port), timeout=10) as client:
            client.sendall(f"GET /health HTTP/{version}\r\n\r\n".encode())
            assert client.recv(100).split()[1] == status


def test_two_hosts_are_malformed(shop: Running) -> None:
    """Whoever stands in front may have looked at the other one."""
    for first, second in (("localhost", "localhost"), (EVIL, "localhost"), ("localhost", EVIL)):
        with socket.create_connection(("127.0.0.1", shop.port), timeout=10) as client:
            client.sendall(f"GET /health HTTP/1.1\r\nHost: {first}\r\nHost: {second}\r\n\r\n".encode())
            assert client.recv(100).split()[1] == b"400"


def test_names_that_are_allowed_come_beside_the_usual(tmp_path: Path) -> None:
    config = ServerConfig(port=0, allowed_hosts=["Shop.Example", "fd00::7"])
    with running(make_scheduler(tmp_path), config) as server:
        for host in ("shop.example", "SHOP.example:8443", "[fd00::7]:1", "localhost"):
            assert ask(server, "GET", "/health", host)[0] == 200, host
        for host in (EVIL, "a.shop.example", "fd00::7"):
            assert ask(server, "GET", "/health", host)[0] == 403, host


@pytest.mark.parametrize(
    ("bound", "allowed", "names"),
    [
        ("127.0.0.1", (), ("localhost", "127.0.0.1", "[::1]")),
        ("127.0.0.3", (), ("localhost", "127.0.0.1", "[::1]", "127.0.0.3")),
        ("::1", (), ("localhost", "127.0.0.1", "[::1]")),
        ("localhost", (), ("localhost", "127.0.0.1", "[::1]")),
        ("127.0.0.1", ("*",), None),
        ("0.0.0.0", (), None),
        ("::", (), None),
        ("10.1.2.3", (), None),
        ("0.0.0.0", ("shop.example",), ("localhost", "127.0.0.1", "[::1]", "shop.example")),
        ("10.1.2.3", ("shop.example",), ("localhost", "127.0.0.1", "[::1]", "10.1.2.3", "shop.example")),
    ],
)
def test_the_names_follow_from_the_address(bound: str, allowed: tuple[str, ...], names: tuple[str, ...] | None) -> None:
    assert served_hosts(bound, allowed).names == names


@pytest.mark.parametrize("name", ["http://shop.example", "shop.example:80", "shop.example/x", "", "a b", "*.example"])
def test_what_is_no_name_is_said_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(port=0, allowed_hosts=[name])


def test_the_command_line_s_option_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerConfig] = []

    def serve(_: object, config: ServerConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("flashrec.front.serve.serve", serve)
    for names in ([], ["a.example", "[::2]"]):
        options = [part for name in names for part in ("--allowed-host", name)]
        monkeypatch.setattr(sys, "argv", ["flashrec", "serve", "--model-path", "any", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        assert list(seen[-1].allowed_hosts) == names
