"""What every route of one application shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from flashrec.server.backend import Scheduler
from flashrec.server.config import ServerConfig
from flashrec.server.lifecycle import Lifecycle
from flashrec.server.metrics import Metrics
from flashrec.server.prompts import HistoryPrompt
from flashrec.server.text import TextCodec

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """One application's parts; built by :func:`flashrec.server.app.create_app`."""

    scheduler: Scheduler
    config: ServerConfig
    codec: TextCodec
    history_prompt: HistoryPrompt
    metrics: Metrics
    lifecycle: Lifecycle
    pool: ThreadPoolExecutor
    small_bytes: int = 0
    """Host work on so many bytes is done on the event loop: handing it to a thread would cost more than it does. Not
    beside an engine, whose thread must not wait for it."""

    @property
    def model_name(self) -> str:
        """The name that ``/v1/models`` lists."""
        return self.config.served_model_name or self.scheduler.engine.config.model_path.resolve().name

    @property
    def model_aliases(self) -> frozenset[str]:
        """What a client may call the model: its name, its path, or ``default``."""
        path = self.scheduler.engine.config.model_path
        return frozenset({self.model_name, str(path), str(path.resolve()), "default"})

    async def in_pool(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run host work (tokenisation, JSON) on a worker thread, off the event loop and engine thread."""
        loop = asyncio.get_running_loop()
        with self.lifecycle.places.hand_over():
            return await loop.run_in_executor(self.pool, lambda: function(*args, **kwargs))

    async def on_host(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run host work on about ``size`` bytes: at once if that is little, else :meth:`in_pool`."""
        if size <= self.small_bytes:
            return function(*args, **kwargs)
        return await self.in_pool(function, *args, **kwargs)
