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
    """``count`` processes. A context manager: its end is theirs.

    ``awake``: a lone client does not sleep while it waits for an answer: see :meth:`.http_client.Client.post`.
    """

    def __init__(self, count: int, *, awake: bool = False) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_client, args=(theirs, awake), daemon=True)
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


def _client(pipe: Connection, awake: bool) -> None:
    """A client process: loads one after the other, until the pipe is closed.

    A lone client's connection stays open; those of more at once are spread over the processes in front anew each time.
    """
    pipe.send(None)
    clients: dict[str, Client] = {}
    while True:
        try:
            url, share, keep = pipe.recv()
        except EOFError:
            return
        client = clients.setdefault(url, Client(url))
        bodies = [
            orjson.dumps({"input_ids": prompt, "sampling_params": share.parameters()}) for prompt in share.prompts()
        ]
        pipe.send(None)
        pipe.recv()
        alone = share.point.concurrency == 1
        pipe.send(_fire(client, bodies, share.concurrency, keep, awake=alone and awake))
        if not alone:
            client.close()


def _fire(
    client: Client, bodies: Sequence[bytes], concurrency: int, keep: frozenset[int], *, awake: bool
) -> tuple[list[Shot], dict[int, tuple[OutputBeam, ...]]]:
    shots: list[Shot] = []
    contents: dict[int, bytes] = {}

    def send(index: int) -> None:
        start = time.time()
        reply = client.post("/generate", bodies[index], awake=awake)
        end = time.time()
        shots.append(Shot(reply.status, end - start, end))
        if index in keep and reply.status == 200:
            contents[index] = reply.content

    lost = closed_loop(send, len(bodies), concurrency).failures
    shots += [Shot(NO_ANSWER, one.latency_s, time.time()) for one in lost]
    return shots, {index: bits_of_json(content) for index, content in contents.items()}
