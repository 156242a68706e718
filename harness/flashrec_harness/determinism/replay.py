"""Replays the wave of a repro bundle beside its request alone, as the axis that found the drift runs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flashrec import Engine, Request, Result
from flashrec.runtime.scheduler import Scheduler
from flashrec_harness.determinism.axes import AXES, Axis
from flashrec_harness.repro import Bundle, BundleError, Wave, beam_record, config_of, ranks, request_of

_WAIT_S = 120.0


def replay(bundle: Bundle, wave: Wave) -> list[dict[str, Any]]:
    """The request alone against itself in the wave, from a cold cache and from a warm one, rank by rank.

    The request alone runs on the bundle's engine, the wave on one with the axis's settings.

    Raises:
        BundleError: the checkpoint or the catalog has changed since, the axis is no more, or the wave needs catalogs
            that the suite loaded as it ran.
    """
    axis = AXES.get(wave.axis)
    requests = [request_of(fields) for fields in wave.requests]
    if axis is None:
        raise BundleError(f"wave: this version has no axis {wave.axis!r}; check out the bundle's commit")
    if any(one.catalog is not None for one in requests):
        raise BundleError(f"wave: it ran over catalogs that the suite loaded on its way; {again(wave)}")
    # What an axis prepares changes the model, so that only the same engine has a reference.
    settings = dict(wave.overrides) if axis.prepare is not None else {}
    with _engine(bundle, axis, settings) as engine:
        (alone,) = _records(engine.generate([requests[wave.at]]))
    rows = []
    with _engine(bundle, axis, dict(wave.overrides)) as engine:
        for cache in ("cold", "warm"):
            now = _records(_run(engine, axis, requests))[wave.at]
            rows += [{"cache": cache, **row} for row in ranks(alone, now)]
    return rows


def again(wave: Wave) -> str:
    """The command that repeats everything around the wave, in words."""
    return f"flashrec-harness determinism --only '{wave.axis}' repeats all that the axis does"


@contextmanager
def _engine(bundle: Bundle, axis: Axis, settings: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(config_of(bundle, **settings))
    try:
        if axis.prepare is not None:
            axis.prepare(engine)
        yield engine
    finally:
        engine.close()


def _run(engine: Engine, axis: Axis, requests: Sequence[Request]) -> list[Result]:
    if not axis.scheduled:
        return engine.generate(requests)
    scheduler = Scheduler(engine)
    try:
        answers = [scheduler.submit(one) for one in requests]
        scheduler.start()
        return [answer.result(_WAIT_S) for answer in answers]
    finally:
        scheduler.close()


def _records(results: Sequence[Result]) -> list[list[dict[str, Any]]]:
    return [[beam_record(beam) for beam in result.beams] for result in results]
