"""What is compared: a request's output bits, and where they were seen."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrec.request import Beam

if TYPE_CHECKING:
    from flashrec.runtime.ledger import StepDigest

Ledger = list[dict[str, int]]
"""One record per step: a digest per field of :data:`flashrec.runtime.ledger.FIELDS`."""


@dataclass(frozen=True, slots=True)
class OutputBeam:
    """Token ids of one beam and the bytes of its two float32 scores, in hex."""

    token_ids: tuple[int, ...]
    cumulative_bits: str
    score_bits: str


def float_bits(value: float) -> str:
    """The four bytes of a float32, in hex."""
    return struct.pack("<f", value).hex()


def bits_float(bits: str) -> float:
    """The inverse of :func:`float_bits`."""
    (value,) = struct.unpack("<f", bytes.fromhex(bits))
    return float(value)


def output_beams(beams: Iterable[Beam]) -> tuple[OutputBeam, ...]:
    """A result's beams as they are compared."""
    return tuple(
        OutputBeam(beam.token_ids, float_bits(beam.cumulative_logprob), float_bits(beam.score)) for beam in beams
    )


def output_digest(beams: Sequence[OutputBeam]) -> str:
    """16 hex digits over the beams' token ids and score bytes, in rank order."""
    digest = hashlib.sha256()
    for beam in beams:
        digest.update(struct.pack(f"<{len(beam.token_ids) + 1}q", len(beam.token_ids), *beam.token_ids))
        digest.update(bytes.fromhex(beam.cumulative_bits + beam.score_bits))
    return digest.hexdigest()[:16]


def plain_ledger(steps: Sequence[StepDigest]) -> Ledger:
    """A request's step digests as JSON data."""
    return [dict(step.digests) for step in steps]


def ledger_digest(ledger: Ledger) -> str:
    """16 hex digits over all records; empty for no ledger."""
    if not ledger:
        return ""
    return hashlib.sha256(json.dumps(ledger, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Observation:
    """One wave that held a probe. ``output`` and ``ledger`` are keys of a :class:`ProcessReport`'s tables.

    ``case`` says what was special about the wave, ``place`` where in it the probe stood, ``rows`` and
    ``requests`` how large it was, and ``cached`` how many of the probe's tokens the cache held.
    """

    axis: str
    case: str
    probe: str
    output: str
    ledger: str
    rows: int
    requests: int
    place: int
    cached: int


def wave_key(probe: str, output: str) -> str:
    """A probe and the digest of its output, as a key of :attr:`ProcessReport.waves`."""
    return f"{probe}/{output}"


@dataclass(slots=True)
class ProcessReport:
    """What one process saw. ``witness`` counts, per axis, the events without which the axis shows nothing.

    ``waves`` holds, by :func:`wave_key`, the requests of the first wave that gave a probe an output, in order.
    """

    process: int
    hash_seed: str
    threads: int
    device: str
    observations: list[Observation] = field(default_factory=list)
    outputs: dict[str, tuple[OutputBeam, ...]] = field(default_factory=dict)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    waves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    witness: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, axis: str, event: str, times: int = 1) -> None:
        """Add to a witness counter; 0 makes it appear."""
        counters = self.witness.setdefault(axis, {})
        counters[event] = counters.get(event, 0) + times

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProcessReport:
        """The inverse of :meth:`write`."""
        return cls.of(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> ProcessReport:
        """From plain data."""
        return cls(
            **{
                **body,
                "observations": [Observation(**one) for one in body["observations"]],
                "outputs": {
                    key: tuple(OutputBeam(**{**beam, "token_ids": tuple(beam["token_ids"])}) for beam in beams)
                    for key, beams in body["outputs"].items()
                },
            }
        )
