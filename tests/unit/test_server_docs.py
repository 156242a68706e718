"""Every request in ``docs/server.md`` gets an answer of the structure that the page shows.

``FLASHREC_REWRITE_DOCS=1`` writes the answers of the bundled checkpoint into the page instead.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from server_support import Running, running

from flashrec import Engine, EngineConfig
from flashrec.runtime.scheduler import Scheduler
from flashrec.server.config import ServerConfig

PAGE = Path("docs/server.md")
SHOP = Path("engine/flashrec/assets/tiny-shop")
EXAMPLE = re.compile(
    r"```sh\ncurl -s http://127\.0\.0\.1:8000(?P<path>/\S+)(?P<rest>[^`]*?)\n```\n\n```json\n(?P<answer>.*?)\n```", re.S
)
REWRITE = os.environ.get("FLASHREC_REWRITE_DOCS") == "1"


@dataclass(frozen=True)
class Example:
    path: str
    body: Any
    answer: Any


def examples() -> list[Example]:
    found = []
    for match in EXAMPLE.finditer(PAGE.read_text(encoding="utf-8")):
        body = re.search(r"-d '(.*)'", match["rest"], re.S)
        found.append(Example(match["path"], json.loads(body[1]) if body else None, json.loads(match["answer"])))
    return found


def ask(server: Running, path: str, body: Any) -> Any:
    response = server.client.get(path) if body is None else server.post(path, body)
    return response.json()


def structure(value: Any) -> Any:
    """Keys and types; what differs between machines and runs (numbers, ids, kernels chosen) is left out."""
    if isinstance(value, dict):
        return {key: structure(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [structure(entry) for entry in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def rewrite(server: Running) -> None:
    def fresh(match: re.Match[str]) -> str:
        body = re.search(r"-d '(.*)'", match["rest"], re.S)
        answer = ask(server, match["path"], json.loads(body[1]) if body else None)
        text = json.dumps(answer, indent=2, ensure_ascii=False).replace(str(Path.cwd()), "/var/lib/flashrec")
        text = re.sub(r"\[\s+((?:-?[\d.]+,?\s*)+)\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
        return match[0].replace(f"```json\n{match['answer']}\n```", f"```json\n{text}\n```")

    PAGE.write_text(EXAMPLE.sub(fresh, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


@contextmanager
def serving(config: EngineConfig) -> Iterator[Running]:
    scheduler = Scheduler(Engine(config))
    scheduler.start()
    with running(scheduler, ServerConfig(port=0, catalog_dir=SHOP)) as server:
        yield server


@pytest.fixture(scope="module")
def shop() -> Iterator[Running]:
    config = EngineConfig(model_path=SHOP, sid_vocab_file=SHOP / "items.tsv", device="cpu", kv_pool_tokens=8192)
    if REWRITE:
        with serving(config) as server:
            rewrite(server)
    with serving(config) as server:
        yield server


def test_the_page_shows_each_endpoint() -> None:
    text = PAGE.read_text(encoding="utf-8")
    paths = {example.path for example in examples()}
    assert paths == {
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/recommend",
        "/v1/models",
        "/server_info",
        "/catalog",
        "/catalog/rollback",
    }
    for path in ("/health", "/health_generate", "/metrics", "/flush_cache", "/start_profile", "/stop_profile"):
        assert path in text


def test_every_documented_answer_has_the_structure_of_the_real_one(shop: Running) -> None:
    for example in examples():
        real = ask(shop, example.path, example.body)
        if example.path == "/server_info":
            for answer in (real, example.answer):
                for section in ("engine", "engine_config"):
                    answer[section] = sorted(answer[section]) if section == "engine_config" else "counters"
        assert structure(real) == structure(example.answer), example.path
