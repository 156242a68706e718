"""The suite: both sides started together, every point measured in turns, judged."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from flashrec.errors import ConfigError
from flashrec_harness import budget, hardware
from flashrec_harness.http_client import may_poll
from flashrec_harness.httpcost import judge
from flashrec_harness.httpcost.cells import JUDGED_FROM, SMALL, WAKE, Point, points
from flashrec_harness.httpcost.figures import SUITE
from flashrec_harness.httpcost.gauge import Gauge
from flashrec_harness.httpcost.measure import Loads, Measured, lockstep, measure
from flashrec_harness.httpcost.sides import both
from flashrec_harness.httpcost.tails import tail
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf.workload import load_workload

WORKLOAD = "anchors"
_PRECISION = ("quantization", "dtype", "kv_cache_dtype")
_POOL_TOKENS, _SMALL_POOL_TOKENS = 300_000, 65_536
"""Fixed, so that two engines fit one GPU: the widest two waves, and some thousands of prompts that are evicted."""
_FREE_TOKENS = 3
"""Length of a search without a catalog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCostSettings:
    """Each of ``rounds`` rounds measures both sides for about ``seconds`` at every point, or at those with ``at``
    requests at once. ``clients`` processes send; ``http_processes`` is the server's, ``None`` for its own default."""

    seconds: float = 4.0
    rounds: int = 4
    clients: int = 8
    http_processes: int | None = None
    at: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.clients < 1 or not self.seconds > 0:
            raise ConfigError(
                "rounds, clients, seconds: at least 1, 1 and above 0, "
                f"got {self.rounds}, {self.clients} and {self.seconds:g}"
            )


QUICK = HttpCostSettings(seconds=1.5, rounds=3, clients=2)


def run(context: SuiteContext, settings: HttpCostSettings | None = None) -> list[Check]:
    """Measure ``context``'s checkpoint at the points of the anchors workload; without a GPU, or with ``quick``, at
    :data:`~flashrec_harness.httpcost.cells.SMALL`."""
    settings = settings or (QUICK if context.quick else HttpCostSettings())
    chosen, engine = menu(quick=context.quick, gpu=hardware.has_gpu())
    chosen = _at(chosen, settings.at)
    loads = Loads(
        seed=context.seed,
        clients=settings.clients,
        vocabulary=_vocabulary(context),
        max_tokens=None if context.sid_vocab_file is not None else _FREE_TOKENS,
    )
    sides = both(context, engine, http_processes=settings.http_processes, clients=settings.clients)
    with sides as (served, inside), Gauge() if may_poll() else nullcontext() as gauge:
        if gauge is not None:
            gauge.take()  # its process has started: that would disturb what is measured
        paces = [lockstep(inside, point, loads) for point in chosen]
        inside.start()
        server = served.told("server")
        woken = served.load(loads.load(WAKE, 2 * WAKE.concurrency, turn=0))
        each = partial(measure, seconds=settings.seconds, rounds=settings.rounds, gauge=gauge)
        measuring = (
            partial(each, point, served, inside, loads, pace=pace) for point, pace in zip(chosen, paces, strict=True)
        )
        found = while_time_lasts(measuring)
        budget.release()
    checks = judged(found, Counter(shot.status for shot in woken.shots))
    if len(found) < len(chosen):
        checks.append(_cut_short(chosen[len(found) :]))
    for check in checks:
        check.data |= {"settings": asdict(settings), "engine": dict(engine), "server": server}
    return checks


def menu(*, quick: bool, gpu: bool) -> tuple[tuple[Point, ...], Mapping[str, Any]]:
    """The points, and the engine's settings on both sides: as the workload sets them on a GPU."""
    workload = load_workload(WORKLOAD)
    fixed = {"invariance_check": False}
    if gpu and not quick:
        return points(workload), {**workload.engine, **fixed, "kv_pool_tokens": _POOL_TOKENS}
    precision = {name: value for name, value in workload.engine.items() if gpu and name in _PRECISION}
    return SMALL, {**precision, **fixed, "kv_pool_tokens": _SMALL_POOL_TOKENS}


def while_time_lasts(measuring: Iterable[Callable[[], Measured]]) -> list[Measured]:
    """Measure point after point as long as the time budget, where there is one, has room for another like the longest
    so far. What has been measured is not lost to it; the caller releases it next."""
    found: list[Measured] = []
    longest = 0.0
    with suppress(budget.BudgetSpent):
        for measure_one in measuring:
            left = budget.seconds_left()
            if left is not None and left < longest:
                break
            start = time.monotonic()
            found.append(measure_one())
            longest = max(longest, time.monotonic() - start)
    return found


def _cut_short(missing: Sequence[Point]) -> Check:
    """Fewer points say nothing else about those that were measured."""
    return Check(
        SUITE,
        "time budget",
        Outcome.INCONCLUSIVE,
        f"not measured: {', '.join(point.name for point in missing)}",
        reason="the time budget has no room for another point: allow more (--budget)",
    )


def _at(chosen: tuple[Point, ...], concurrency: int | None) -> tuple[Point, ...]:
    """The points with so many requests at once, all for ``None``. Raises :class:`ConfigError` where there is none."""
    found = tuple(point for point in chosen if concurrency in (None, point.concurrency))
    if not found:
        known = ", ".join(map(str, sorted({point.concurrency for point in chosen})))
        raise ConfigError(f"--at {concurrency}: no point has so many requests at once; there are some with {known}")
    return found


def judged(found: list[Measured], woken: Counter[int]) -> list[Check]:
    """All checks: of every point its throughput or its tail, then of all points together, with the statuses of what
    came before them."""
    each = [judge.throughput(one) if one.point.concurrency >= JUDGED_FROM else tail(one) for one in found]
    return [*each, judge.arrived(found, woken), judge.same_answers(found)]


def _vocabulary(context: SuiteContext) -> int:
    """Token ids that prompts are drawn from."""
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(context.model_path))
