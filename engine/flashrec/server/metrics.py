"""Prometheus metrics, in a registry of their own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from flashrec.request import Result
from flashrec.runtime.catalogs import Place

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """What the server counts. The label ``endpoint`` is a route, never a path that a client made up.

    Where several processes serve, each counts into files of ``shared`` (prometheus-client's multiprocess mode, which
    ``PROMETHEUS_MULTIPROC_DIR`` turned on before it was imported), and each answers with the sum of all.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, shared: Path | None = None) -> None:
        self._shared = shared
        self._watched: list[Collector] = []
        self._unsettled: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "flashrec_http_requests", "HTTP requests answered", ["endpoint", "status"], registry=self.registry
        )
        self.latency = Histogram(
            "flashrec_http_request_seconds",
            "HTTP request latency",
            ["endpoint"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.phases = Histogram(
            "flashrec_phase_seconds",
            "Time in a phase: tokenize (parse, validate, encode), search (queue and wave), respond",
            ["phase"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.errors = Counter("flashrec_errors", "Failed requests by kind", ["kind"], registry=self.registry)
        self.cancelled = Counter(
            "flashrec_cancelled_requests", "Requests whose client went away", registry=self.registry
        )
        self.prompt_tokens = Counter("flashrec_prompt_tokens", "Prompt tokens served", registry=self.registry)
        self.cached_tokens = Counter(
            "flashrec_cached_tokens", "Prompt tokens that the prefix cache held", registry=self.registry
        )
        self.catalog_changes = Counter(
            "flashrec_catalog_changes",
            "Loads, rollbacks and drops of catalogs, by outcome: ok or refused",
            ["action", "outcome"],
            registry=self.registry,
        )
        self.beams = Counter("flashrec_beams", "Beams returned", registry=self.registry)

    def phase(self, name: str) -> _Phase:
        """Observe the time of a block under ``phase=name``, :meth:`later`."""
        return _Phase(self, name)

    def later(self, record: Callable[..., object], *values: Any) -> None:
        """Call ``record`` with ``values`` when the answer has gone: see :meth:`settle`. From any thread."""
        self._unsettled.append((record, values))

    def answered(self, results: Sequence[Result]) -> None:
        """Count what is in an answer."""
        self.prompt_tokens.inc(sum(result.prompt_tokens for result in results))
        self.cached_tokens.inc(sum(result.cached_tokens for result in results))
        self.beams.inc(sum(len(result.beams) for result in results))

    def settle(self) -> None:
        """Record what waits; on the event loop. What is not needed for an answer is done behind it."""
        while self._unsettled:
            record, values = self._unsettled.popleft()
            record(*values)

    def watch(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Export what ``read`` returns as ``flashrec_engine_*`` gauges, read at each scrape."""
        self._watched.append(_EngineStats(read))

    def watch_catalogs(self, read: Callable[[], Mapping[str, Place]]) -> None:
        """Export the catalogs served, as ``flashrec_catalog_info``, read at each scrape."""
        self._watched.append(_CatalogInfo(read))

    def text(self) -> bytes:
        """The exposition format, as Prometheus scrapes it."""
        counted = self.registry
        if self._shared is not None:
            counted = CollectorRegistry()
            MultiProcessCollector(counted, str(self._shared))
        watched = CollectorRegistry()
        for collector in self._watched:
            watched.register(collector)
        return generate_latest(counted) + generate_latest(watched)


class _Phase:
    """A block whose time is observed; as a generator's context manager it would be four more frames."""

    __slots__ = ("_metrics", "_name", "_start")

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics = metrics
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._metrics.later(self._observe, time.perf_counter() - self._start)

    def _observe(self, seconds: float) -> None:
        self._metrics.phases.labels(self._name).observe(seconds)


class _EngineStats(Collector):
    """Numbers become gauges; a mapping of texts (kernels chosen) becomes one info metric."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._read().items()):
            metric = f"flashrec_engine_{name}"
            if isinstance(value, (bool, int, float)):
                yield GaugeMetricFamily(metric, f"Engine: {name}", value=float(value))
            elif isinstance(value, Mapping) and value:
                if all(isinstance(entry, (bool, int, float)) for entry in value.values()):
                    family = GaugeMetricFamily(metric, f"Engine: {name}", labels=["name"])
                    for key, entry in sorted(value.items()):
                        family.add_metric([str(key)], float(entry))
                    yield family
                elif all(isinstance(entry, str) for entry in value.values()):
                    yield InfoMetricFamily(metric, f"Engine: {name}", value=dict(value))


class _CatalogInfo(Collector):
    """One sample of value 1 per revision that a name stands for."""

    def __init__(self, read: Callable[[], Mapping[str, Place]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["name", "state", "revision", "digest"]
        family = GaugeMetricFamily("flashrec_catalog_info", "Catalogs in service and on standby", labels=labels)
        for name, place in self._read().items():
            for state, served in (("active", place.active), ("standby", place.standby)):
                if served is not None:
                    family.add_metric([name, state, str(served.revision), served.catalog.digest], 1.0)
        yield family
