"""The whole way: a serving process, a real engine, real sockets, signals and exit status."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_support import error_of, running, wait_until, write_checkpoint

from flashrec import Engine, EngineConfig, Request
from flashrec.errors import ConfigError
from flashrec.runtime.scheduler import Scheduler
from flashrec.server.config import ServerConfig
from flashrec.server.run import bind

PROMPTS = [tuple((7 * seed + 3 * place) % 256 for place in range(5 + 9 * seed)) for seed in range(8)]
WIDTHS = (1, 2, 3, 4)


def engine_config(checkpoint: Path) -> EngineConfig:
    return EngineConfig(
        model_path=checkpoint,
        sid_vocab_file=checkpoint / "items.tsv",
        device="cpu",
        max_beam_width=64,
        kv_pool_tokens=4096,
        max_decode_steps=4,
        invariance_check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[tuple[int, int], list[tuple[tuple[int, ...], float]]]:
    """Each (prompt, n) searched alone, in this process."""
    engine = Engine(engine_config(checkpoint))
    alone = {}
    for index, prompt in enumerate(PROMPTS):
        for n in WIDTHS:
            engine.flush_cache()
            (result,) = engine.generate([Request(input_ids=prompt, n=n)])
            alone[index, n] = [(beam.token_ids, beam.score) for beam in result.beams]
    return alone


class Served:
    """``flashrec serve`` in a process of its own."""

    def __init__(self, arguments: list[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], stdout=sink, stderr=sink, env=child_environment() | environment
            )

    def url(self) -> str:
        def listening() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log.read_text()
            return re.search(r"on (http://127\.0\.0\.1:\d+)", self.log.read_text())

        wait_until(listening, 120)
        match = listening()
        assert match is not None
        wait_until(lambda: answers(match[1]), 60)
        return match[1]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def child_environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": "engine:harness", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module", params=[0, 2], ids=["alone", "two-fronts"])
def served(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, str, Path]]:
    """The engine's process speaks HTTP itself, or two others do."""
    directory = tmp_path_factory.mktemp("served")
    profiles = directory / "profiles"
    arguments = ["-m", "flashrec", "serve", "--model-path", str(checkpoint), "--port", "0", "--device", "cpu"]
    arguments += ["--sid-vocab-file", str(checkpoint / "items.tsv"), "--max-beam-width", "64"]
    arguments += ["--kv-pool-tokens", "4096", "--max-decode-steps", "4", "--http-processes", str(request.param)]
    server = Served(arguments, directory / "log", FLASHREC_TORCH_PROFILER_DIR=str(profiles))
    try:
        yield server, server.url(), profiles
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()


def search(url: str, index: int, n: int) -> list[tuple[tuple[int, ...], float]]:
    body = {"input_ids": list(PROMPTS[index]), "sampling_params": {"n": n}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    beams = answer["meta_info"]["beam_results"]
    return [(tuple(beam["output_ids"]), beam["meta_info"]["sequence_score"]) for beam in beams]


def test_http_answers_are_the_engine_s_bits_under_load(
    served: tuple[Served, str, Path], expected: dict[tuple[int, int], Any]
) -> None:
    """Another process, other waves, a warm cache, 16 clients at once: tokens and scores equal to the bit."""
    _, url, _ = served
    jobs = [(index, n) for _ in range(3) for index in range(len(PROMPTS)) for n in WIDTHS]
    with ThreadPoolExecutor(16) as pool:
        for job, beams in zip(jobs, pool.map(lambda job: search(url, *job), jobs), strict=True):
            assert beams == expected[job], job
    info = httpx.get(f"{url}/server_info").json()["engine"]
    assert info["hit_tokens"] > 0
    assert 0 < info["waves"] < len(jobs)
    assert info["free_pages"] + info["cached_pages"] == info["usable_pages"]


def test_clients_that_leave_cost_no_page_and_no_answer(
    served: tuple[Served, str, Path], expected: dict[tuple[int, int], Any]
) -> None:
    """120 connections cut at a random place, resets among them, beside requests that are checked."""
    _, url, _ = served
    port = int(url.rpartition(":")[2])

    def leave(seed: int) -> None:
        choice = random.Random(seed)
        body = json.dumps({"input_ids": list(PROMPTS[seed % 8]), "sampling_params": {"n": 1 + seed % 4}}).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}"
        whole = f"{head}\r\n\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(whole[: choice.choice([len(whole), choice.randrange(len(whole))])])
            time.sleep(choice.random() * 0.02)
            if choice.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(8) as pool:
        gone = [pool.submit(leave, seed) for seed in range(120)]
        for job in [(seed % 8, WIDTHS[seed % 4]) for seed in range(24)]:
            assert search(url, *job) == expected[job]
        for future in gone:
            future.result()

    def settled() -> bool:
        info = httpx.get(f"{url}/server_info").json()
        return info["server"]["in_flight"] == info["server"]["queue_depth"] == 0

    wait_until(settled, 30)
    info = httpx.get(f"{url}/server_info").json()["engine"]
    assert info["free_pages"] + info["cached_pages"] == info["usable_pages"]


def test_every_endpoint_answers(served: tuple[Served, str, Path]) -> None:
    _, url, _ = served
    with httpx.Client(base_url=url, timeout=60) as client:
        chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "n": 2})
        assert len(chat.json()["choices"]) == 2
        assert len(client.post("/v1/completions", json={"prompt": "x", "n": 3}).json()["choices"]) == 3
        items = client.post("/v1/recommend", json={"history": ["kiwi"], "k": 5, "exclude_history": True}).json()[
            "items"
        ]
        assert {item["item_id"] for item in items} == {"apple", "pear", "plum", "42"}
        only = client.post("/v1/recommend", json={"history": ["kiwi"], "exclude": ["apple"], "allow": [[0, 0]]}).json()
        assert [item["item_id"] for item in only["items"]] == ["pear"]
        assert client.get("/health_generate").status_code == 200
        assert client.post("/flush_cache").status_code == 200
        assert "flashrec_engine_waves" in client.get("/metrics").text
        free = {"text": "x", "sampling_params": {"n": 2, "max_new_tokens": 2, "constrained": False}}
        assert len(client.post("/generate", json=free).json()["meta_info"]["beam_results"]) == 2
        seeded = {"prompt": "x", "n": 3, "temperature": 1.0, "seed": 5}
        first, second = (client.post("/v1/completions", json=seeded).json()["choices"] for _ in range(2))
        assert first == second


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_ids": [265]}, "input_ids"),
        ("/generate", {"input_ids": [1] * 513}, "input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 65}}, "sampling_params.n"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2}}, "sampling_params.max_new_tokens"),
        ("/generate", {"input_ids": [1], "sampling_params": {"exclude": ["nix"]}}, "sampling_params.exclude"),
        ("/v1/completions", {"prompt": "x", "allow": [[2, 2]]}, "allow"),
        (
            "/v1/completions",
            {"prompt": "x", "constrained": False, "max_tokens": 1, "score_space": "sid"},
            "score_space",
        ),
        ("/v1/recommend", {"history": ["kiwi"], "k": 65}, "k"),
    ],
)
def test_the_engine_s_refusals_name_the_client_s_field(
    served: tuple[Served, str, Path], path: str, body: dict[str, Any], field: str
) -> None:
    _, url, _ = served
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field


def test_a_profile_of_a_serving_process(served: tuple[Served, str, Path]) -> None:
    """T3: every span of a request's way, the engine thread's and the others'."""
    _, url, profiles = served
    start = {"num_steps": 2, "profile_prefix": "run", "output_dir": "sub", "with_stack": False}
    assert httpx.post(f"{url}/start_profile", json=start, timeout=60).status_code == 200
    for _ in range(3):
        search(url, 0, 2)
    path = profiles / "sub" / "run-TP-0.trace.json.gz"
    wait_until(path.exists, 60)
    wait_until(lambda: httpx.get(f"{url}/server_info").json()["profiler"]["state"] == "idle", 60)
    trace = json.loads(gzip.decompress(path.read_bytes()))
    spans = {event["name"] for event in trace["traceEvents"] if str(event.get("name")).startswith("flashrec.")}
    assert {"flashrec.tokenize", "flashrec.prefill", "flashrec.decode", "flashrec.finalize"} <= spans
    assert httpx.post(f"{url}/stop_profile", timeout=60).json()["files"] == [str(path)]


def test_a_wave_that_raises_is_a_fault_for_all_who_wait(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(engine_config(checkpoint))

    def broken(_: object) -> None:
        time.sleep(0.2)
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "outcomes", broken)
    scheduler = Scheduler(engine)
    scheduler.start()
    with running(scheduler, ServerConfig(port=0)) as server, ThreadPoolExecutor(4) as pool:
        url = f"http://127.0.0.1:{server.port}/generate"
        body = {"input_ids": [1], "sampling_params": {"n": 1}}
        answers = list(pool.map(lambda _: httpx.post(url, json=body, timeout=30), range(4)))
        assert {answer.status_code for answer in answers} <= {500, 503}
        assert any("device lost" in answer.text for answer in answers)
        assert server.context.lifecycle.fault is not None


def test_a_fault_ends_the_process_with_status_1(checkpoint: Path, tmp_path: Path) -> None:
    script = (
        "import sys, logging; logging.basicConfig(level='INFO')\n"
        "from flashrec.runtime.engine import Engine; from flashrec import EngineConfig\n"
        "from flashrec.server.config import ServerConfig; from flashrec.front.serve import serve\n"
        "def broken(self, flight): raise RuntimeError('device lost')\n"
        "Engine.outcomes = broken\n"
        f"config = EngineConfig(model_path={str(checkpoint)!r}, sid_vocab_file={str(checkpoint / 'items.tsv')!r},"
        " device='cpu', kv_pool_tokens=4096, invariance_check=False)\n"
        "sys.exit(serve(config, ServerConfig(port=0)))\n"
    )
    server = Served(["-c", script], tmp_path / "log")
    try:
        response = httpx.post(f"{server.url()}/generate", json={"input_ids": [1]}, timeout=60)
        assert (response.status_code, error_of(response)["code"]) == (500, "engine_fault")
        assert server.process.wait(60) == 1
    finally:
        server.process.kill()
        server.process.wait()


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    first = bind("127.0.0.1", 0)
    first.listen()
    try:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    finally:
        first.close()
    with pytest.raises(ConfigError, match="host"):
        bind("no.such.host.invalid", 0)
