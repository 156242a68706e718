"""Repro bundles: a request that went wrong, with everything needed to run it again (SPEC H3b)."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flashrec import Beam, Engine, EngineConfig, Request, Result, ScoreSpace
from flashrec.errors import FlashRecError
from flashrec_harness.environment import content_digest, model_digest
from flashrec_harness.planting import planted_names

SCHEMA = 1
SCORE_TOLERANCE = 1e-4
"""Largest difference in float32 between our score and a reference's."""


class BundleError(FlashRecError):
    """A bundle is malformed, or the checkpoint or catalog beside it is not the one it was made with."""


@dataclass(frozen=True, slots=True)
class Wave:
    """The wave in which a request went wrong.

    ``requests`` in their order, the one in question at index ``at``; ``overrides`` are the engine settings of the
    determinism suite's ``axis``.
    """

    axis: str
    requests: Sequence[Mapping[str, Any]]
    at: int
    overrides: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bundle:
    """``observed`` are the beams that were returned, ``expected`` those of the reference, if there was one.

    A beam is ``{"token_ids", "score_bits"}``, the latter the float32 score's bytes in hex; one of a reference
    may have ``score``, a number, instead. ``ledger`` holds
    the step digests of the wave; ``reason`` says what was wrong. Without a ``wave`` the request is run alone.
    ``planted`` are the faults that the engine carried on purpose.
    """

    suite: str
    reason: str
    request: Mapping[str, Any]
    engine: Mapping[str, Any]
    digests: Mapping[str, str]
    observed: Sequence[Mapping[str, Any]]
    expected: Sequence[Mapping[str, Any]] = ()
    ledger: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    wave: Wave | None = None
    planted: Sequence[str] = ()


def beam_record(beam: Beam) -> dict[str, Any]:
    """A beam as bundles compare it: token ids and the exact bits of its score."""
    return {"token_ids": list(beam.token_ids), "score_bits": struct.pack("<f", beam.score).hex()}


def digests(config: EngineConfig) -> dict[str, str]:
    """Content of the checkpoint and of the catalog."""
    found = {"model": model_digest(config.model_path)}
    if config.sid_vocab_file is not None:
        found["catalog"] = content_digest(config.sid_vocab_file)
    return found


def save_bundle(
    path: Path,
    *,
    suite: str,
    reason: str,
    request: Request,
    config: EngineConfig,
    result: Result,
    expected: Sequence[Mapping[str, Any]] = (),
    ledger: Sequence[Mapping[str, Any]] = (),
    wave: Wave | None = None,
) -> Path:
    """Write a bundle for ``result``; ``flashrec-harness repro PATH`` replays it."""
    bundle = Bundle(
        suite,
        reason,
        asdict(request),
        config.model_dump(mode="json"),
        digests(config),
        [beam_record(beam) for beam in result.beams],
        expected,
        ledger,
        wave,
        planted_names(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema": SCHEMA, **asdict(bundle)}
    path.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def load_bundle(path: Path) -> Bundle:
    """Read a bundle. Raises :class:`BundleError` if it is not one."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path}: not a repro bundle: no JSON ({error})") from None
    if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
        raise BundleError(
            f"{path}: not a repro bundle of schema {SCHEMA}, which suites save as *.json in their reports"
        )
    wave = body.pop("wave", None)
    _check_fields(path, "it", Bundle, body)
    if wave is not None:
        _check_fields(path, "its wave", Wave, wave)
    return Bundle(**body, wave=None if wave is None else Wave(**wave))


_OPTIONAL = {"expected", "ledger", "wave", "planted"}


def _check_fields(path: Path, of: str, kind: type, body: Any) -> None:
    names = {one.name for one in fields(kind)}
    given = set(body) if isinstance(body, dict) else set()
    wrong = [f"lacks {name}" for name in sorted(names - given - _OPTIONAL)]
    wrong += [f"has an unknown {name}" for name in sorted(given - names)]
    if wrong:
        raise BundleError(f"{path}: a damaged repro bundle: {of} {', '.join(wrong)}")


def request_of(fields: Mapping[str, Any]) -> Request:
    """A request from its fields; JSON has lists where it has tuples."""

    def tuples(value: Any) -> Any:
        return tuple(tuples(one) for one in value) if isinstance(value, list) else value

    values = {name: tuples(value) for name, value in fields.items()}
    space = values["score_space"]
    return Request(**(values | {"score_space": None if space is None else ScoreSpace(space)}))


def config_of(bundle: Bundle, **overrides: Any) -> EngineConfig:
    """The bundle's engine. Raises :class:`BundleError` if the checkpoint or the catalog has changed since."""
    config = EngineConfig(**{**bundle.engine, **overrides})
    changed = [name for name, digest in digests(config).items() if digest != bundle.digests.get(name)]
    if changed:
        raise BundleError(f"{' and '.join(changed)} changed since the bundle was made; check out its commit")
    return config


def replay(bundle: Bundle) -> list[dict[str, Any]]:
    """Run the request alone in a fresh engine. Raises as :func:`config_of`."""
    engine = Engine(config_of(bundle))
    try:
        (result,) = engine.generate([request_of(bundle.request)])
    finally:
        engine.close()
    return [beam_record(beam) for beam in result.beams]


def compare(bundle: Bundle, again: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rank by rank: what the reference wants (without one, what was observed) and what the replay gave."""
    return ranks(list(bundle.expected) or list(bundle.observed), again)


def ranks(wanted: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Two lists of beams as a table, rank by rank."""
    return [
        {
            "rank": rank,
            "wanted": want and list(want["token_ids"]),
            "score wanted": want and want.get("score_bits", want.get("score")),
            "now": got and list(got["token_ids"]),
            "score now": got and got["score_bits"],
            "same": _same(want, got),
        }
        for rank, (want, got) in enumerate(itertools.zip_longest(wanted, again), start=1)
    ]


def _same(want: Mapping[str, Any] | None, got: Mapping[str, Any] | None) -> bool:
    if want is None or got is None or list(want["token_ids"]) != list(got["token_ids"]):
        return False
    if "score_bits" in want:
        return bool(want["score_bits"] == got["score_bits"])
    # Another implementation's list has other bits: its score need only be close.
    return "score" not in want or abs(want["score"] - _score(got)) <= SCORE_TOLERANCE


def _score(record: Mapping[str, Any]) -> float:
    (score,) = struct.unpack("<f", bytes.fromhex(record["score_bits"]))
    return float(score)
