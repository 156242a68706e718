"""What a server holds: pages, requests and files when nothing runs, and its resident memory over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from flashrec_harness.http_client import Client, json_of
from flashrec_harness.load import percentile

_NOTICE_S = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """What is held when nothing runs: all but the last must be zero."""

    requests: int
    queued: int
    lost_pages: int
    """Neither free nor cached."""
    pinned_pages: int
    """Cached still after a flush: some reader never let go."""
    rows: int
    """Rows of waves that were launched and never finished."""
    usable_pages: int

    @property
    def leaks(self) -> dict[str, int]:
        """What is not zero."""
        counts = {name: getattr(self, name) for name in ("requests", "queued", "lost_pages", "pinned_pages", "rows")}
        return {name: count for name, count in counts.items() if count}


def held(client: Client, patience_s: float) -> Held:
    """Wait until nothing runs, but no longer than ``patience_s``; flush the prefix cache, and count what is left."""
    end = time.monotonic() + patience_s
    while True:
        server: Any = json_of(client.get("/server_info"))["server"]
        if server["in_flight"] == server["queue_depth"] == 0 or time.monotonic() > end:
            break
        time.sleep(0.1)
    client.post("/flush_cache", b"")  # between waves: what the last one held has been given back
    info: Any = json_of(client.get("/server_info"))
    engine, server = info["engine"], info["server"]
    return Held(
        requests=server["in_flight"],
        queued=server["queue_depth"],
        lost_pages=engine["usable_pages"] - engine["free_pages"] - engine["cached_pages"],
        pinned_pages=engine["cached_pages"],
        rows=server["rows_in_flight"],
        usable_pages=engine["usable_pages"],
    )


@dataclass(slots=True)
class Memory:
    """Resident memory of a process and its children in MiB, sampled at ``seconds`` since the start."""

    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def growth(self, warm_up_s: float, quantile: float = 0.5) -> tuple[float, float]:
        """A quantile (0.5: the median; 0.1: the floor below what comes and goes) of the first and of the last fifth of
        the samples after ``warm_up_s``."""
        late = [mib for second, mib in zip(self.seconds, self.mib, strict=True) if second >= warm_up_s]
        fifth = max(1, len(late) // 5)
        return percentile(late[:fifth], 100 * quantile), percentile(late[-fifth:], 100 * quantile)


@contextmanager
def watched(pid: int | None, every_s: float) -> Iterator[Memory]:
    """Sample the memory of process ``pid`` while the block runs; nothing without one."""
    memory, stop = Memory(), threading.Event()
    if pid is None:
        yield memory
        return
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    start = time.monotonic()

    def sample() -> None:
        while not stop.wait(every_s):
            memory.mib.append(_resident(processes))
            memory.seconds.append(time.monotonic() - start)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        stop.set()
        thread.join()


def _resident(processes: Sequence[psutil.Process]) -> float:
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


def open_files(pid: int | None) -> int | None:
    """File descriptors of a process, sockets included, once it has seen our connections close; ``None`` without one."""
    if pid is None:
        return None
    time.sleep(_NOTICE_S)
    return int(psutil.Process(pid).num_fds())
