"""The axis that needs a server: the bits of an answer under concurrent load equal those of the request alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from flashrec_harness.determinism.judge import SUITE, bound
from flashrec_harness.determinism.lab import FREE_TOKENS
from flashrec_harness.determinism.ledger_diff import first_beam
from flashrec_harness.determinism.records import OutputBeam, float_bits
from flashrec_harness.determinism.task import Task
from flashrec_harness.dialects import Reply, dialect_of
from flashrec_harness.load import closed_loop
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.servers import flashrec_server

NAME = "same bits over HTTP under concurrent load"
_CLIENTS = 8
_TIMEOUT_S = 120.0
_WAIT_S = 0.02

Answers = Mapping[int, Sequence[tuple[OutputBeam, ...]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the load: prompt token ids and number of beams. The first of a load is the probe."""

    prompt: tuple[int, ...]
    n: int


def roster(task: Task) -> list[Asked]:
    """The probe and five mates of other lengths and widths."""
    rng = task.shared_rng("http")
    mates = [Asked(prompt[rng.randrange(len(prompt)) :], rng.randint(1, 12)) for prompt in task.prompts[1:6]]
    return [Asked(task.prompts[0], task.width), *mates]


class Client:
    """Sends requests in the server's dialect and reads the answers' bits."""

    def __init__(self, url: str, *, constrained: bool) -> None:
        limits = httpx.Limits(max_connections=_CLIENTS, max_keepalive_connections=_CLIENTS)
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False)
        self.dialect = dialect_of(url)
        self._length = None if constrained and self.dialect.has_catalog else FREE_TOKENS

    def ask(self, asked: Asked) -> tuple[OutputBeam, ...]:
        """Raises :class:`httpx.HTTPError` where the server refuses or is gone."""
        body = self.dialect.body(asked.prompt, asked.n, self._length)
        response = self._client.post(self.dialect.path, json=body)
        response.raise_for_status()
        return tuple(_beam(reply) for reply in self.dialect.beams(response.json()))

    def engine_stats(self) -> dict[str, Any] | None:
        """The engine's counters, where the server shows them."""
        response = self._client.get("/server_info")
        found: dict[str, Any] | None = response.json().get("engine") if response.is_success else None
        return found

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _beam(reply: Reply) -> OutputBeam:
    return OutputBeam(reply.tokens, _bits(reply.cumulative), _bits(reply.score))


def _bits(value: float | None) -> str:
    """Empty for a score that the server does not tell."""
    return "" if value is None else float_bits(value)


def load_answers(client: Client, asked: Sequence[Asked], requests: int, rng: random.Random) -> Answers:
    """Send ``requests`` requests, every other one the probe, from eight clients with random delays."""
    order = [0 if index % 2 == 0 else rng.randrange(1, len(asked)) for index in range(requests)]
    waits = [rng.choice((0.0, _WAIT_S * rng.random())) for _ in order]
    answers: dict[int, list[tuple[OutputBeam, ...]]] = {index: [] for index in range(len(asked))}
    lock = threading.Lock()

    def send(index: int) -> None:
        time.sleep(waits[index])
        beams = client.ask(asked[order[index]])
        with lock:
            answers[order[index]].append(beams)

    failures = closed_loop(send, requests, _CLIENTS).failures
    if failures:
        raise RuntimeError(f"{len(failures)} of {requests} requests failed, first: {failures[0].error}")
    return answers


@contextmanager
def _server(context: SuiteContext, env: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Our server on this checkpoint; its URL and its start's retries."""
    layout = ("--sid", context.sid) if context.sid else ()
    with flashrec_server(
        context.model_path,
        sid_vocab_file=context.sid_vocab_file,
        arguments=(*layout, "--no-invariance-check"),
        env=env,
        log_dir=context.out_dir,
    ) as server:
        yield server.url, server.retries


def check(context: SuiteContext, task: Task, env: Mapping[str, str], in_process: Sequence[OutputBeam] | None) -> Check:
    """Start our server (or take ``context.url``), ask alone, then under load, and compare bit by bit.

    ``in_process`` are the probe's beams as the engine gave them without a server.
    """
    requests = 48 if context.quick and context.url is None else 240
    if context.url is not None:
        return _judge(task, context.url, requests, None, [])
    with _server(context, env) as (url, retries):
        return _judge(task, url, requests, in_process if task.sid_vocab_file else None, retries)


def _judge(
    task: Task, url: str, requests: int, in_process: Sequence[OutputBeam] | None, retries: Sequence[str]
) -> Check:
    client, asked = Client(url, constrained=task.sid_vocab_file is not None), roster(task)
    try:
        alone = [client.ask(one) for one in asked]
        before = client.engine_stats()
        answers = load_answers(client, asked, requests, task.shared_rng("load"))
        after = client.engine_stats()
    finally:
        client.close()
    rows = [
        {"request": f"{index} (n = {asked[index].n})", "output": first_beam(alone[index], beams)}
        for index, given in answers.items()
        for beams in given
        if beams != alone[index]
    ]
    if in_process is not None and tuple(in_process) != alone[0]:
        rows.insert(0, {"request": "probe, in process and over HTTP", "output": first_beam(in_process, alone[0])})
    waves = None if before is None or after is None else after["waves"] - before["waves"]
    result = Check(
        SUITE,
        NAME,
        Outcome.FAIL if rows else Outcome.PASS,
        f"{len(rows)} of {requests} answers differ from the request alone, {len(answers[0])} of them the probe, "
        f"{_CLIENTS} clients, {client.dialect.path}; {_compared(alone)}; {_shared(requests, waves)}; "
        f"{bound(len(rows), requests)}",
        data={"requests": requests, "drifted": len(rows), "waves": waves, "retries": list(retries)},
        rows=[dict(row) for row in rows[:20]],
    )
    if rows:
        result.reason = f"request {rows[0]['request']}: {rows[0]['output']}"
    elif waves is not None and waves >= requests:
        result.outcome, result.reason = Outcome.INVALID, "no two requests shared a wave: there was no load"
    return result


def _compared(alone: Sequence[Sequence[OutputBeam]]) -> str:
    told = all(beam.score_bits for beams in alone for beam in beams)
    return "tokens and score bytes" if told else "tokens alone: the server tells no scores"


def _shared(requests: int, waves: int | None) -> str:
    return "waves cannot be seen" if waves is None else f"{requests} requests in {waves} waves"
