"""Client processes: started once, each sends its share of a load and keeps some answers."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import orjson
import psutil

from flashrec_harness.determinism.records import OutputBeam
from flashrec_harness.http_client import Client
from flashrec_harness.httpcost.bits import Kept, bits_of_json
from flashrec_harness.httpcost.cells import Share, compared
from flashrec_harness.load import closed_loop
from flashrec_harness.overload.fleet import Shot

NO_ANSWER = 0
"""Status of a request that got none."""


class Clients:
    """``count`` processes. A context manager: its end is theirs."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_client, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # or a client that died would leave us waiting
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    @property
    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(process.pid) for process in self._processes]

    def await_start(self) -> None:
        """Wait until all have done their imports, which would cost whatever is measured meanwhile; once."""
        for pipe in self._pipes:
            pipe.recv()

    def load(self, url: str, load: list[Share]) -> tuple[list[Shot], Kept]:
        """Send all shares at once; the bodies are written beforehand. Raises :class:`EOFError` if a process died."""
        pipes = self._pipes[: len(load)]
        for number, (pipe, share) in enumerate(zip(pipes, load, strict=True)):
            pipe.send((url, share, compared(load, number)))
        for pipe in pipes:
            pipe.recv()  # ready
        for pipe in pipes:
            pipe.send(None)  # go
        shots, kept = list[Shot](), Kept()
        for number, pipe in enumerate(pipes):
            found, answers = pipe.recv()
            shots += found
            kept |= {(number, index): answer for index, answer in answers.items()}
        return shots, kept


def _client(pipe: Connection) -> None:
    """A client process: loads one after the other, until the pipe is closed."""
    pipe.send(None)
    while True:
        try:
            url, share, keep = pipe.recv()
        except EOFError:
            return
        bodies = [
            orjson.dumps({"input_ids": prompt, "sampling_params": share.parameters()}) for prompt in share.prompts()
        ]
        pipe.send(None)
        pipe.recv()
        pipe.send(_fire(url, bodies, share.concurrency, keep))


def _fire(
    url: str, bodies: Sequence[bytes], concurrency: int, keep: frozenset[int]
) -> tuple[list[Shot], dict[int, tuple[OutputBeam, ...]]]:
    shots: list[Shot] = []
    contents: dict[int, bytes] = {}
    with Client(url) as client:

        def send(index: int) -> None:
            start = time.time()
            reply = client.post("/generate", bodies[index])
            end = time.time()
            shots.append(Shot(reply.status, end - start, end))
            if index in keep and reply.status == 200:
                contents[index] = reply.content

        lost = closed_loop(send, len(bodies), concurrency).failures
    shots += [Shot(NO_ANSWER, one.latency_s, time.time()) for one in lost]
    return shots, {index: bits_of_json(content) for index, content in contents.items()}
