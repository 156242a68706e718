"""What can be measured: the engine in this process, or a running server."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Protocol

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from flashrec_harness.dialects import dialect_of
from flashrec_harness.http_client import Client
from flashrec_harness.load import LoadResult, closed_loop, open_loop
from flashrec_harness.material import Prompt
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.overload.fleet import Fleet
from flashrec_harness.perf import profiled
from flashrec_harness.perf.workload import Cell, Workload

_MOST_CLIENTS = 8
"""Client processes of a load, at most."""

Outputs = dict[int, list[list[int]]]
"""Prompt number -> token ids of its beams, best first."""


class Subject(Protocol):
    """One thing under measurement, for one cell at a time."""

    def prepare(self, cell: Cell, prompts: Sequence[Prompt], *, clients: int | None = None, keep: bool = True) -> None:
        """Take the next cell; forgets the outputs of the last. A server is loaded by so many ``clients`` processes, and
        its answers are kept if they will be asked for."""

    def round_size(self, cell: Cell) -> int:
        """Requests per round."""

    def generate(self, numbers: Sequence[int]) -> object:
        """Answer these requests together."""

    def closed(self, requests: int, concurrency: int) -> LoadResult:
        """As many clients, each with its next request when the last one is answered."""

    def open(self, requests: int, rate: float, seed: int) -> LoadResult:
        """Poisson arrivals at ``rate`` per second."""

    def flush(self) -> None:
        """Empty the prefix cache."""

    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in the prefix cache since :meth:`prepare`; ``None`` if unknown."""

    def outputs_digest(self) -> str:
        """Digest of the token ids that the cell's prompts got."""

    def was_profiled(self) -> bool:
        """Whether a profiler has ever run in the measured process."""

    def peak_gpu_mib(self) -> float | None:
        """Highest GPU memory allocated, in MiB; ``None`` without a GPU."""

    def configuration(self) -> dict[str, Any]:
        """What the subject says of itself: kernels chosen, dtypes, flags."""

    def close(self) -> None:
        """Let go of everything."""


def digest_outputs(outputs: Outputs) -> str:
    return hashlib.sha256(json.dumps(sorted(outputs.items())).encode()).hexdigest()[:16]


class Threads(ABC):
    """Loops of threads in this process around :meth:`send`."""

    @abstractmethod
    def send(self, number: int) -> object:
        """Answer one request; called from many threads."""

    def closed(self, requests: int, concurrency: int) -> LoadResult:
        """As :meth:`Subject.closed`."""
        return closed_loop(self.send, requests, concurrency)

    def open(self, requests: int, rate: float, seed: int) -> LoadResult:
        """As :meth:`Subject.open`."""
        return open_loop(self.send, requests, rate, seed=seed)


class EngineSubject(Threads):
    """:class:`flashrec.Engine` in this process: lockstep waves, or a scheduler under client threads.

    A request is answered when its beams' tokens and scores are arrays on the host.
    """

    def __init__(self, context: SuiteContext, workload: Workload) -> None:
        from flashrec import Engine, EngineConfig
        from flashrec.runtime.scheduler import Scheduler

        widest = max(cell.n for cell in workload.cells)
        settings = {
            "model_path": context.model_path,
            "sid_vocab_file": context.sid_vocab_file,
            "sid": context.sid,
            "score_space": workload.score_space,
            "max_beam_width": widest,
        }
        self._engine = Engine(EngineConfig(**(settings | dict(workload.engine))))
        # As a serving process does (Scheduler.start): the collector need not scan what lives as long as it.
        gc.collect()
        gc.freeze()
        self._scheduler: Scheduler | None = None
        self._requests: list[Any] = []
        self._token_ids: dict[int, NDArray[np.int32]] = {}
        self._prompt_tokens = self._cached_tokens = 0

    def prepare(self, cell: Cell, prompts: Sequence[Prompt], *, clients: int | None = None, keep: bool = True) -> None:
        from flashrec import Request
        from flashrec.runtime.scheduler import Scheduler

        self._requests = [
            Request(input_ids=ids, n=cell.n, max_tokens=cell.max_tokens, rid=f"prompt-{number}")
            for number, ids in enumerate(prompts)
        ]
        self._token_ids, self._prompt_tokens, self._cached_tokens = {}, 0, 0
        if cell.drive != "batch" and self._scheduler is None:
            self._scheduler = Scheduler(self._engine)
            self._scheduler.start()

    def round_size(self, cell: Cell) -> int:
        return cell.requests

    def _keep(self, number: int, result: Any) -> None:
        self._prompt_tokens += result.prompt_tokens
        self._cached_tokens += result.cached_tokens
        self._token_ids[number % len(self._requests)] = result.beams.arrays().token_ids

    def generate(self, numbers: Sequence[int]) -> None:
        wave = [self._requests[number % len(self._requests)] for number in numbers]
        for number, result in zip(numbers, self._engine.generate(wave), strict=True):
            self._keep(number, result)

    def send(self, number: int) -> None:
        assert self._scheduler is not None
        self._keep(number, self._scheduler.submit(self._requests[number % len(self._requests)]).result())

    def flush(self) -> None:
        self._engine.flush_cache()

    def hit_rate(self) -> float | None:
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else None

    def outputs_digest(self) -> str:
        return digest_outputs({number: tokens.tolist() for number, tokens in self._token_ids.items()})

    def was_profiled(self) -> bool:
        return profiled.ever()

    def peak_gpu_mib(self) -> float | None:
        import torch

        return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None

    def configuration(self) -> dict[str, Any]:
        return dict(self._engine.stats())

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        self._engine.close()


class HttpSubject:
    """A server that is already running: ours, SGLang, or one with OpenAI's completions.

    ``sid_tokens`` is the length of a semantic ID, which every server is asked for: one with a catalog ends there
    anyway, one without would go on. Of a yardstick ``requests`` says how many a round has.

    Client processes send what is not in lockstep, and read the answers when the loop is over: 32 threads of one process
    that read as they went got 366 answers a second of 50 beams from a server that gives 684 (H200, 2026-12-02).
    """

    def __init__(self, url: str, sid_tokens: int | None = None, *, requests: int | None = None) -> None:
        self.url = url
        self._requests = requests
        self._dialect = dialect_of(url)
        self._sid_tokens = sid_tokens
        self._bodies: list[bytes] = []
        self._contents: dict[int, bytes] = {}
        self._keep = True
        self._open = ExitStack()

    def prepare(self, cell: Cell, prompts: Sequence[Prompt], *, clients: int | None = None, keep: bool = True) -> None:
        self.close()
        self._keep = keep
        length = cell.max_tokens or self._sid_tokens
        self._bodies = [orjson.dumps(self._dialect.body(prompt, cell.n, length)) for prompt in prompts]
        self._contents = {}
        if cell.drive == "batch":
            self._client = self._open.enter_context(Client(self.url))
            self._threads = self._open.enter_context(ThreadPoolExecutor(cell.concurrency))
            return
        clients = clients or _clients_for(cell)
        self._fleet = self._open.enter_context(closing(Fleet(self.url, self._bodies, clients, self._dialect.path)))

    def round_size(self, cell: Cell) -> int:
        return self._requests or cell.requests

    def generate(self, numbers: Sequence[int]) -> None:
        list(self._threads.map(self._post, numbers))

    def _post(self, number: int) -> None:
        prompt = number % len(self._bodies)
        reply = self._client.post(self._dialect.path, self._bodies[prompt])
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {reply.content[:200].decode(errors='replace')}")
        self._contents[prompt] = reply.content

    def closed(self, requests: int, concurrency: int) -> LoadResult:
        return self._load(requests, concurrency, None, 0)

    def open(self, requests: int, rate: float, seed: int) -> LoadResult:
        return self._load(requests, 1, rate, seed)

    def _load(self, requests: int, concurrency: int, rate: float | None, seed: int) -> LoadResult:
        self._fleet.rewind()
        load = self._fleet.load(requests, concurrency, rate, seed, keep=self._keep)
        self._contents |= load.contents
        return load.result(requests)

    def flush(self) -> None:
        httpx.post(f"{self.url}/flush_cache", timeout=60.0, trust_env=False).raise_for_status()

    def hit_rate(self) -> float | None:
        return None

    def outputs_digest(self) -> str:
        return digest_outputs(
            {
                prompt: [list(reply.tokens) for reply in self._dialect.beams(orjson.loads(content))]
                for prompt, content in self._contents.items()
            }
        )

    def was_profiled(self) -> bool:
        profiler = self.configuration().get("profiler", {})
        return bool(profiler.get("files")) or profiler.get("state", "idle") != "idle"

    def peak_gpu_mib(self) -> float | None:
        return None

    def configuration(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/server_info", timeout=60.0, trust_env=False)
        return dict(answer.json()) if answer.status_code == httpx.codes.OK else {}

    def close(self) -> None:
        self._open.close()


def _clients_for(cell: Cell) -> int:
    """Client processes of a cell's load: at most half of the cores, and in a closed loop no more than clients."""
    most = min(_MOST_CLIENTS, max(1, len(os.sched_getaffinity(0)) // 2))
    return most if cell.drive == "open" else min(most, cell.concurrency)
