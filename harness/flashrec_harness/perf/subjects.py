"""What can be measured: the engine in this process, or a running server."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx
import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from flashrec_harness.dialects import dialect_of
from flashrec_harness.load import HttpTarget
from flashrec_harness.material import Prompt
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.perf import profiled
from flashrec_harness.perf.workload import Cell, Workload

OPEN_CONNECTIONS = 512
"""Connections that a client may open: the closed loop's threads bound it there, nothing in an open loop."""

Outputs = dict[int, list[list[int]]]
"""Prompt number -> token ids of its beams, best first."""


class Subject(Protocol):
    """One thing under measurement, for one cell at a time."""

    def prepare(self, cell: Cell, prompts: Sequence[Prompt]) -> None:
        """Take the next cell; forgets the outputs of the last."""

    def round_size(self, cell: Cell) -> int:
        """Requests per round."""

    def generate(self, numbers: Sequence[int]) -> object:
        """Answer these requests together."""

    def send(self, number: int) -> object:
        """Answer one request; called from many threads."""

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


class EngineSubject:
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

    def prepare(self, cell: Cell, prompts: Sequence[Prompt]) -> None:
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
    """

    def __init__(self, url: str, sid_tokens: int | None = None, *, requests: int | None = None) -> None:
        self.url = url
        self._requests = requests
        self._dialect = dialect_of(url)
        self._sid_tokens = sid_tokens
        self._target: HttpTarget | None = None

    @property
    def path(self) -> str:
        """Where searches are asked for."""
        return self._dialect.path

    def bodies(self, prompts: Sequence[Prompt], n: int) -> list[bytes]:
        """A request for each prompt, as it is sent."""
        return [orjson.dumps(self._dialect.body(prompt, n, self._sid_tokens)) for prompt in prompts]

    @property
    def target(self) -> HttpTarget:
        """The connection of the cell in hand."""
        assert self._target is not None
        return self._target

    def prepare(self, cell: Cell, prompts: Sequence[Prompt]) -> None:
        if self._target is not None:
            self._target.close()
        # An open loop sends whatever is due: a request that waits for a connection would be the client's delay.
        self._target = HttpTarget(
            self.url,
            prompts,
            n=cell.n,
            max_new_tokens=cell.max_tokens or self._sid_tokens,
            concurrency=max(cell.concurrency, OPEN_CONNECTIONS),
            dialect=self._dialect,
        )

    def round_size(self, cell: Cell) -> int:
        return self._requests or cell.requests

    def generate(self, numbers: Sequence[int]) -> None:
        with ThreadPoolExecutor(len(numbers)) as pool:
            list(pool.map(self.target, numbers))

    def send(self, number: int) -> None:
        self.target(number)

    def flush(self) -> None:
        httpx.post(f"{self.url}/flush_cache", timeout=60.0, trust_env=False).raise_for_status()

    def hit_rate(self) -> float | None:
        return None

    def outputs_digest(self) -> str:
        return digest_outputs(self.target.outputs)

    def was_profiled(self) -> bool:
        profiler = self.configuration().get("profiler", {})
        return bool(profiler.get("files")) or profiler.get("state", "idle") != "idle"

    def peak_gpu_mib(self) -> float | None:
        return None

    def configuration(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/server_info", timeout=60.0, trust_env=False)
        return dict(answer.json()) if answer.status_code == httpx.codes.OK else {}

    def close(self) -> None:
        if self._target is not None:
            self._target.close()
