"""Requests made from the server's own OpenAPI document, over a real socket, against a real engine.

``--hypothesis-budget nightly`` sends more than 2,000 of them; the normal form some hundred.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core import NOT_SET
from schemathesis.core.failures import FailureGroup
from server_support import Running, running, wait_until

from flashrec import Engine, EngineConfig
from flashrec.kvcache.pool import KVPool
from flashrec.runtime.scheduler import Scheduler
from flashrec.server import openai
from flashrec.server.config import ServerConfig

SHOP = Path("engine/flashrec/assets/tiny-shop")
ITEMS = ("P2208", "P0331", "P1918", "P1079")
OPTIONAL = (
    "beam_width",
    "max_tokens",
    "max_completion_tokens",
    "max_new_tokens",
    "best_of",
    "model",
    "timeout",
    "rid",
    "catalog",
)
"""Fields whose valid values depend on the server and on each other."""
HANG_S = 20.0
CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
PROBE = {"text": "hello", "sampling_params": {"n": 5, "score_space": "children"}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = EngineConfig(
        model_path=SHOP,
        sid_vocab_file=SHOP / "items.tsv",
        device="cpu",
        kv_pool_tokens=8192,
        max_beam_width=64,
        invariance_check=False,
    )
    scheduler = Scheduler(Engine(config))
    scheduler.start()
    with running(scheduler, ServerConfig(port=0, request_timeout_s=10.0)) as server:
        yield server


@pytest.fixture
def examples(pytestconfig: pytest.Config) -> int:
    """Requests per operation and mode."""
    return 250 if pytestconfig.getoption("--hypothesis-budget") == "nightly" else 15


@dataclass
class Attack:
    """What came back: statuses per operation and mode, and everything that the document does not allow."""

    statuses: dict[tuple[str, str], Counter[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def sent(self) -> int:
        return sum(sum(counts.values()) for counts in self.statuses.values())


def servable(body: Any) -> Any:
    """Keeps a valid body valid, and brings its numbers and names into this server's range, so that many are served."""
    if not isinstance(body, dict):
        return body
    changed = {key: _whole(value) for key, value in body.items()}
    params = body.get("sampling_params")
    changed["sampling_params"] = servable(params[0] if isinstance(params, list) and params else params)
    for key in ("n", "k"):
        if isinstance(changed.get(key), int):
            changed[key] = 1 + changed[key] % 16
    for key in ("input_ids", "prompt"):
        changed[key] = _in_vocabulary(changed.get(key))
    for key in ("exclude", "allow", "history"):
        if body.get(key):
            changed[key] = [ITEMS[index % len(ITEMS)] for index, _ in enumerate(body[key])]
    for key in OPTIONAL:
        changed.pop(key, None)
    return {key: value for key, value in changed.items() if key in body}


def _whole(value: Any) -> Any:
    """JSON Schema counts 2.0 as an integer; this server does not (SPEC V4), and no client sends one."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _in_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_vocabulary(one) for one in value]
    return value % 256 if isinstance(value, int) else value


def attack(server: Running, examples: int, wanted: str = "") -> Attack:
    """Send ``examples`` valid and as many invalid requests to each operation whose path contains ``wanted``."""
    found = Attack()
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    for operation in (result.ok() for result in schema.get_all_operations()):
        if "profile" in operation.path or wanted not in operation.path:
            continue
        takes_body = operation.method.upper() == "POST"
        for mode in schemathesis.GenerationMode if takes_body else [schemathesis.GenerationMode.POSITIVE]:
            found.statuses[operation.label, mode.value] = _attack_one(operation, mode, examples, found.problems)
    return found


def _attack_one(operation: Any, mode: Any, examples: int, problems: list[str]) -> Counter[int]:
    statuses: Counter[int] = Counter()

    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode.value == "positive" and statuses.total() % 4:
            case.body = servable(case.body)
        try:
            response = case.call(timeout=HANG_S)
        except requests.Timeout:
            problems.append(f"{operation.label}: no answer in {HANG_S} s: {case.body!r:.300}")
            return
        statuses[response.status_code] += 1
        if response.status_code >= 500 and response.status_code not in (503, 504):
            problems.append(f"{operation.label}: {response.status_code} for {case.body!r:.300}")
        try:
            # An optional body that is left out is not invalid, whatever the generator meant by it.
            checks = CHECKS if case.body is not NOT_SET else [c for c in CHECKS if c is not negative_data_rejection]
            case.validate_response(response, checks=checks)
        except FailureGroup as failures:
            problems.extend(
                f"{operation.label}: {failure!r:.300} for {case.body!r:.300}" for failure in failures.exceptions
            )

    send()
    return statuses


def answer_of(server: Running) -> list[Any]:
    response = server.post("/generate", PROBE)
    assert response.status_code == 200
    return [
        (beam["output_ids"], beam["meta_info"]["sequence_score"])
        for beam in response.json()["meta_info"]["beam_results"]
    ]


def assert_nothing_held(server: Running) -> None:
    """No request, and no page that is neither free nor cached; after a flush all are free, so no wave reads one."""

    def info() -> Any:
        return server.client.get("/server_info").json()

    wait_until(lambda: info()["server"]["in_flight"] == info()["server"]["queue_depth"] == 0)
    assert server.client.post("/flush_cache").status_code == 200
    engine = info()["engine"]
    assert engine["cached_pages"] == 0
    assert engine["free_pages"] == engine["usable_pages"]


@pytest.mark.timeout(1800)
def test_the_document_is_what_the_server_does(shop: Running, examples: int) -> None:
    before = answer_of(shop)
    found = attack(shop, examples)
    assert found.problems == []
    assert found.sent >= 8 * examples  # 2,000 in the nightly form
    for label in ("POST /generate", "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/recommend"):
        served = found.statuses[label, "positive"]
        assert served[200] >= served.total() / 3, f"{label}: too few reached the engine: {served}"
    assert shop.client.get("/health").status_code == 200
    assert_nothing_held(shop)
    assert answer_of(shop) == before


def test_a_server_error_would_be_found(shop: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    real = openai.usage

    def usage(results: Any) -> dict[str, object]:
        if results[0].prompt_tokens % 2:
            raise KeyError("planted")
        return real(results)

    monkeypatch.setattr(openai, "usage", usage)
    assert any("500" in problem for problem in attack(shop, 15, "/v1/completions").problems)


def test_a_document_that_is_not_what_the_server_takes_would_be_found(
    shop: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    app: Any = shop.server.config.app._app  # type: ignore[union-attr]
    lying = copy.deepcopy(app.openapi())
    body = lying["paths"]["/flush_cache"]["post"]["requestBody"]
    body["required"] = True
    body["content"]["application/json"]["schema"] = {
        "type": "object",
        "properties": {"sure": {"const": True}},
        "required": ["sure"],
    }
    monkeypatch.setattr(app, "openapi_schema", lying)
    assert any("AcceptedNegativeData" in problem for problem in attack(shop, 15, "/flush_cache").problems)


def test_a_leaked_page_would_be_counted(shop: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked: list[int] = []
    real = KVPool.give_back

    def give_back(pool: KVPool, pages: list[int]) -> None:
        if pages and not leaked:
            leaked.append(pages[0])
            pages = pages[1:]
        real(pool, pages)

    monkeypatch.setattr(KVPool, "give_back", give_back)
    answer_of(shop)
    with pytest.raises(AssertionError):
        assert_nothing_held(shop)
    real(shop.scheduler.engine.parts.pool, leaked)
    assert_nothing_held(shop)
