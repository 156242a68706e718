"""The two sides: a server with client processes, and the engine in this process under threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from flashrec import Engine, EngineConfig, Request
from flashrec.request import BeamArrays, LazyBeams, Result
from flashrec.runtime.scheduler import Scheduler
from flashrec_harness import hardware
from flashrec_harness.http_client import Client, json_of, may_poll
from flashrec_harness.httpcost.bits import Kept, bits_of_arrays
from flashrec_harness.httpcost.cells import Share, compared
from flashrec_harness.httpcost.clients import Clients
from flashrec_harness.load import closed_loop
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.overload.cores import divide, kept_to
from flashrec_harness.overload.fleet import Shot
from flashrec_harness.servers import SPAWNED, RunningServer, flashrec_server

STOLEN = "taken by the host"
"""Among the processes: what the host of this machine, if it has one, kept from all of them."""
START_TIMEOUT_S = 600.0
"""Two engines compile and capture at the same time."""


@dataclass(frozen=True, slots=True)
class Fired:
    """What came back of a load."""

    shots: list[Shot]
    kept: Kept


@dataclass(frozen=True, slots=True)
class Counters:
    """Waves that the engine ran, prompt tokens it found cached, and CPU seconds by process and :data:`STOLEN`, since
    ever."""

    waves: int
    hit_tokens: int
    cpu_s: Mapping[str, float]


class Side(Protocol):
    """What can be loaded."""

    def load(self, load: list[Share]) -> Fired:
        """Send all shares at once, and wait for the answers. What is sent is made beforehand."""

    def counters(self) -> Counters:
        """As they stand; nothing runs."""


class Served:
    """A server, and the clients that load it."""

    def __init__(self, server: RunningServer, clients: Clients) -> None:
        self._url, self._process = server.url, psutil.Process(server.process.pid)
        self._clients = clients

    def load(self, load: list[Share]) -> Fired:
        return Fired(*self._clients.load(self._url, load))

    def told(self, section: str) -> Any:
        """A section of the server's ``/server_info``."""
        with Client(self._url) as client:
            return json_of(client.get("/server_info"))[section]

    def counters(self) -> Counters:
        engine = self.told("engine")
        fronts = [child for child in self._process.children(recursive=True) if SPAWNED in " ".join(child.cmdline())]
        cpu = {"engine": _cpu_s([self._process])}
        cpu |= {f"front {number}": _cpu_s([front]) for number, front in enumerate(fronts, 1)}
        cpu["clients"] = _cpu_s(self._clients.processes)
        cpu[STOLEN] = hardware.stolen_s()
        return Counters(engine["waves"], engine["hit_tokens"], cpu)


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


class InProcess:
    """An engine in this process. ``generate`` may be used until :meth:`start`, :meth:`load` from then on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = Scheduler(engine)

    def start(self) -> None:
        """Hand the engine to its scheduler."""
        self._scheduler.start()

    def close(self) -> None:
        """End the scheduler, if it runs, and the engine."""
        self._scheduler.close()
        self._engine.close()

    def wave(self, share: Share) -> float:
        """Answer a share's prompts in one call; the seconds that it took."""
        requests = [_request(share, index, prompt) for index, prompt in enumerate(share.prompts())]
        start = time.perf_counter()
        for result in self._engine.generate(requests):
            _arrays(result)
        return time.perf_counter() - start

    def load(self, load: list[Share]) -> Fired:
        places = sorted(
            ((index, number) for number, share in enumerate(load) for index in range(share.count)),
        )
        prompts = [share.prompts() for share in load]
        requests = [_request(load[number], index, prompts[number][index]) for index, number in places]
        keep = [compared(load, number) for number in range(len(load))]
        shots, arrays = list[Shot](), dict[tuple[int, int], BeamArrays]()

        def send(at: int) -> None:
            start = time.time()
            answer = _arrays(self._scheduler.submit(requests[at]).result())
            end = time.time()
            shots.append(Shot(200, end - start, end))
            index, number = places[at]
            if index in keep[number]:
                arrays[number, index] = answer

        lost = closed_loop(send, len(requests), sum(share.concurrency for share in load)).failures
        if lost:
            raise RuntimeError(f"in process: {len(lost)} of {len(requests)} requests failed, first: {lost[0].error}")
        return Fired(shots, {place: bits_of_arrays(answer) for place, answer in arrays.items()})

    def counters(self) -> Counters:
        stats = self._engine.stats()
        cpu = {"engine": time.process_time(), STOLEN: hardware.stolen_s()}
        return Counters(stats["waves"], stats["hit_tokens"], cpu)


def _request(share: Share, index: int, prompt: Sequence[int]) -> Request:
    rid = "-".join(map(str, (*share.seed, index)))
    n = share.point.n
    return Request(input_ids=tuple(prompt), n=n, beam_width=n, max_tokens=share.max_tokens, rid=rid)


def _arrays(result: Result) -> BeamArrays:
    assert isinstance(result.beams, LazyBeams)  # what an engine's results hold
    return result.beams.arrays()


@contextmanager
def both(
    context: SuiteContext, engine: Mapping[str, Any], *, http_processes: int | None, clients: int
) -> Iterator[tuple[Served, InProcess]]:
    """Start both sides at the same time, with the same settings of the engine; ``engine`` overrides its fields."""
    cores, awake = divide(frozenset(os.sched_getaffinity(0))), may_poll()
    config = EngineConfig(
        model_path=context.model_path, sid_vocab_file=context.sid_vocab_file, sid=context.sid, **engine
    )
    layout = ("--sid", context.sid) if context.sid else ()
    fronts = () if http_processes is None else ("--http-processes", str(http_processes))
    started = flashrec_server(
        context.model_path,
        sid_vocab_file=context.sid_vocab_file,
        arguments=(*layout, *fronts, *engine_flags(engine)),
        log_dir=context.out_dir,
        timeout_s=START_TIMEOUT_S,
    )
    with ThreadPoolExecutor(1) as builder, ExitStack() as stack:
        building = builder.submit(Engine, config)
        with kept_to(cores.clients):
            senders = stack.enter_context(Clients(clients, awake=awake))
        with kept_to(cores.server):
            server = stack.enter_context(started)
        inside = InProcess(building.result())
        stack.callback(inside.close)
        senders.await_start()
        yield Served(server, senders), inside


def engine_flags(engine: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields of ``EngineConfig`` as the server's command line spells them."""
    flags: list[str] = []
    for name, value in engine.items():
        dashed = name.replace("_", "-")
        flags += (
            [f"--{dashed}" if value else f"--no-{dashed}"] if isinstance(value, bool) else [f"--{dashed}", str(value)]
        )
    return tuple(flags)
