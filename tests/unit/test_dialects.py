"""Servers of other kinds behind ``--url``: what can be judged is, and what cannot is refused with the reason."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from flashrec.errors import ConfigError
from flashrec_harness import cli
from flashrec_harness.determinism.suite import run as determinism
from flashrec_harness.dialects import NEEDED, Completions, Generate, Reply, dialect_of, require
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf.subjects import HttpSubject, digest_outputs
from flashrec_harness.perf.workload import Cell
from flashrec_harness.servers import flashrec_server

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def choices(body: dict[str, Any], told: Callable[[list[int], int], dict[str, Any]]) -> dict[str, Any]:
    """``n`` choices that follow from the prompt alone, worst first: their order is in ``index``."""
    found = [
        {"index": rank, "text": f"{sum(body['prompt'])}.{rank}", "finish_reason": "length"}
        | told([sum(body["prompt"]) % 97, rank], rank)
        for rank in range(body["n"])
    ]
    return {"choices": found[::-1]}


def text_only(body: dict[str, Any]) -> dict[str, Any]:
    return choices(body, lambda _, __: {})


def with_scores(body: dict[str, Any]) -> dict[str, Any]:
    return choices(body, lambda ids, rank: {"sglext": {"output_ids": ids, "sequence_score": -0.5 - rank}})


@contextmanager
def stub(posts: dict[str, Answer], models: tuple[str, ...] = ("shop",)) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with these endpoints alone; its URL, and the bodies that asked it for something."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _say(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            self._say(200 if known else 404, {"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path not in posts:
                self._say(404, {"detail": "Not Found"})
            elif not body:
                self._say(422, {"error": {"message": "prompt: is required"}})
            else:
                asked.append(body)
                self._say(200, posts[self.path](body))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def judged(context: SuiteContext, answer: Answer) -> tuple[Check, list[dict[str, Any]]]:
    with stub({"/v1/completions": answer}) as (url, asked):
        check, left = determinism(replace(context, url=url))
    assert left.outcome is Outcome.NOT_RUN
    return check, asked


def test_determinism_judges_a_server_that_has_completions_alone(suite_context: SuiteContext) -> None:
    check, asked = judged(suite_context, with_scores)
    assert check.outcome is Outcome.PASS, check.reason
    assert "/v1/completions; tokens and score bytes; waves cannot be seen" in check.summary
    assert len(asked) == 240 + 6
    assert {body["model"] for body in asked} == {"shop"}
    assert all(body["temperature"] == 0 and body["max_tokens"] == 3 for body in asked)


def test_without_scores_the_verdict_says_so_and_drift_is_still_red(suite_context: SuiteContext) -> None:
    check, _ = judged(suite_context, text_only)
    assert check.outcome is Outcome.PASS
    assert "tokens alone: the server tells no scores" in check.summary
    times = iter(range(10**6))

    def drifting(body: dict[str, Any]) -> dict[str, Any]:
        answer = text_only(body)
        if next(times) == 100:
            answer["choices"][-1]["text"] += "!"
        return answer

    check, _ = judged(suite_context, drifting)
    assert check.outcome is Outcome.FAIL
    assert check.data["drifted"] == 1
    assert "rank 1: tokens" in check.reason


def test_a_changed_score_bit_is_seen_where_scores_are_told(suite_context: SuiteContext) -> None:
    times = iter(range(10**6))

    def drifting(body: dict[str, Any]) -> dict[str, Any]:
        answer = with_scores(body)
        if next(times) == 50:
            answer["choices"][-1]["sglext"]["sequence_score"] = -0.50000006
        return answer

    check, _ = judged(suite_context, drifting)
    assert (check.outcome, check.data["drifted"]) == (Outcome.FAIL, 1)
    assert "score bits 000000bf became 010000bf" in check.reason


def test_what_a_choice_tells_is_taken_in_that_order() -> None:
    by_text = {"index": 1, "text": "ab"}
    by_ids = {"index": 0, "text": "ab", "token_ids": [7, 8]}
    by_both = {"index": 2, "text": "", "token_ids": [7], "sglext": {"output_ids": [9], "sequence_score": -1.0}}
    assert Completions("m").beams({"choices": [by_text, by_ids, by_both]}) == [
        Reply((7, 8), None, None),
        Reply((97, 98), None, None),
        Reply((9,), -1.0, -1.0),
    ]
    native = {"output_ids": [5], "meta_info": {"sequence_score": -2.0, "cumulative_logprob": -4.0}}
    assert Generate().beams({"meta_info": {"beam_results": [native]}}) == [Reply((5,), -4.0, -2.0)]


def test_perf_measures_a_server_that_has_completions_alone() -> None:
    with stub({"/v1/completions": with_scores}) as (url, asked):
        subject = HttpSubject(url, sid_tokens=4)
        subject.prepare(Cell(n=2, concurrency=1, requests=3), [(1, 2, 3), (4, 5)])
        subject.generate([0, 1, 2])
        in_lockstep = subject.outputs_digest()
        assert in_lockstep == digest_outputs({0: [[6, 0], [6, 1]], 1: [[9, 0], [9, 1]]})
        subject.prepare(Cell(n=2, concurrency=1, requests=3, drive="closed"), [(1, 2, 3), (4, 5)])
        assert subject.outputs_digest() == digest_outputs({})
        assert not subject.closed(3, 1).failures
        assert subject.outputs_digest() == in_lockstep
        subject.close()
    assert [body["max_tokens"] for body in asked] == [4] * 6


def test_generate_is_taken_where_both_are_there(model_path: Path) -> None:
    with stub({"/generate": text_only, "/v1/completions": text_only}) as (url, _):
        assert isinstance(dialect_of(url), Generate)
    with flashrec_server(model_path) as server:
        assert isinstance(dialect_of(server.url), Generate)
        for suite in NEEDED:
            require(suite, server.url)


def test_a_server_with_neither_is_refused() -> None:
    with stub({}) as (url, _), pytest.raises(ConfigError, match="neither /generate nor /v1/completions"):
        dialect_of(url)
    with stub({"/v1/completions": text_only}, models=()) as (url, _), pytest.raises(ConfigError, match="no model"):
        dialect_of(url)
    with pytest.raises(httpx.HTTPError):
        dialect_of("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("suite", "endpoint"),
    [("parity", "/server_info"), ("eval", "/server_info"), ("trace", "/generate"), ("soak", "/generate")],
)
def test_a_suite_names_the_endpoint_that_it_misses(suite: str, endpoint: str) -> None:
    with stub({"/v1/completions": text_only}) as (url, _):
        require("determinism", url)
        require("perf", url)
        with pytest.raises(ConfigError, match=f"{suite} needs {endpoint}, which is not there.*by determinism and perf"):
            require(suite, url)


def test_the_command_ends_as_a_mistake_of_use(tmp_path: Path) -> None:
    with stub({"/v1/completions": text_only}) as (url, _), pytest.raises(SystemExit) as left:
        cli.main(["parity", "--quick", "--url", url, "--reports-dir", str(tmp_path)])
    assert left.value.code == 2


@pytest.mark.parametrize("suite", ["parity", "eval", "determinism", "perf", "trace", "soak", "overload"])
def test_an_address_where_nobody_answers_is_a_mistake_of_use(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([suite, "--url", "http://127.0.0.1:1", "--reports-dir", str(tmp_path)])
    assert left.value.code == 2
    assert "error: --url http://127.0.0.1:1: no server answers there" in capsys.readouterr().err
