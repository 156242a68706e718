"""``exclude`` and ``allow`` lists at scale: the lists of the brute-force oracle, and what they cost."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from flashrec import Engine, EngineConfig, Request
from flashrec.request import ScoreSpace
from flashrec.search.filters import resolve_filter
from flashrec_harness.catalogs.random_catalog import SIZES, write_parquet
from flashrec_harness.checkpoints.shapes import make_shape, random_sids
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.parity.ground import sid_vocabulary
from flashrec_harness.references.grammar import SidVocabulary
from flashrec_harness.references.logits import Float64Logits
from flashrec_harness.references.oracle import Oracle, explain
from flashrec_harness.references.types import Hypothesis, SearchCase, Tokens

SHAPE = "tiny-8192"
_REQUESTS, _PROMPT_TOKENS, _BEAMS, _ROUNDS = 8, 64, 10, 7
_TIE = 5e-5
"""Float64 gap in log-probability below which float32 may order two candidates otherwise."""
RESOLVE_MS = 20.0
"""Host time that resolving one request's lists may take, beside a wave that other requests wait for."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the catalog is, how many items a request excludes and which share of the SIDs it allows.

    A quarter as many further items share an SID with another.
    """

    sids: int = 400_000
    excluded_items: int = 10_000
    allowed_share: float = 0.01


class FilteredGrammar:
    """:class:`flashrec_harness.references.grammar.Grammar` over an array: every question scans all legal SIDs."""

    scored_end = None

    def __init__(self, sids: NDArray[np.int32], vocabulary: SidVocabulary) -> None:
        self.legal = len(sids) > 0
        self.vocabulary = vocabulary
        self.steps = sids.shape[1]
        self._sids = sids
        self.end = vocabulary.end
        self._code_of = [{token: code for code, token in enumerate(book)} for book in vocabulary.codebooks]
        self._all = np.array(vocabulary.all_tokens(), dtype=np.int64)

    def children(self, prefix: Tokens) -> NDArray[np.int64]:
        """Legal next tokens after ``prefix``, ascending."""
        rows = self._sids
        for level, token in enumerate(prefix):
            rows = rows[rows[:, level] == self._code_of[level][token]]
        book = np.array(self.vocabulary.codebooks[len(prefix)], dtype=np.int64)
        return np.sort(book[np.unique(rows[:, len(prefix)])])

    def normaliser(self, space: ScoreSpace, prefix: Tokens) -> NDArray[np.int64]:
        """Of the score space ``sid``, the only one asked for here."""
        return self._all


def run(context: SuiteContext, scale: Scale | None = None) -> list[Check]:
    """A check per kind of filter, on a random checkpoint with a random catalog."""
    scale = scale or Scale()
    rng = np.random.default_rng(context.seed)
    sids = random_sids(SIZES, scale.sids, context.seed)
    owner = np.concatenate((np.arange(scale.sids), rng.integers(0, scale.sids, scale.sids // 4)))
    prompts = rng.integers(0, 300, (_REQUESTS, _PROMPT_TOKENS)).tolist()
    plain = [Request(input_ids=tuple(prompt), n=_BEAMS) for prompt in prompts]
    whole = Filtered("no filter", plain, np.ones(scale.sids, dtype=np.bool_))
    with tempfile.TemporaryDirectory(prefix="flashrec-filters-") as name:
        folder = Path(name)
        make_shape(SHAPE, folder, context.seed, console=Console(quiet=True))
        write_parquet(folder / "catalog.parquet", sids[owner])
        config = EngineConfig(
            model_path=folder, sid_vocab_file=folder / "catalog.parquet", device="cpu", invariance_check=False
        )
        engine = Engine(config)
        try:
            judge = _Judge(engine, folder, sids, plain)
            return [judge.check(wave) for wave in (whole, *_filtered(plain, sids, owner, scale, rng))]
        finally:
            engine.close()


@dataclass(frozen=True, slots=True)
class Filtered:
    """A wave under one kind of filter, and which SIDs its first request may return, bool ``[sids]``."""

    name: str
    requests: list[Request]
    legal: NDArray[np.bool_]


def _filtered(
    plain: list[Request], sids: NDArray[np.int32], owner: NDArray[np.int64], scale: Scale, rng: np.random.Generator
) -> list[Filtered]:
    """``owner`` int ``[items]`` is each item's SID."""
    out: list[Filtered] = []
    allowed = int(scale.allowed_share * len(sids))
    for excluded, allow in ((scale.excluded_items, 0), (0, allowed), (scale.excluded_items, allowed)):
        wave, legal = [], []
        for request in plain:
            gone = rng.choice(len(owner), excluded, replace=False)
            kept = rng.choice(len(sids), allow, replace=False) if allow else np.arange(len(sids))
            stays = np.bincount(np.delete(owner, gone), minlength=len(sids)) > 0
            legal.append(stays & (np.bincount(kept, minlength=len(sids)) > 0))
            fields: dict[str, Any] = {"exclude_items": tuple(f"item-{item}" for item in gone)}
            if allow:
                fields["allow_sids"] = tuple(map(tuple, sids[kept].tolist()))
            wave.append(replace(request, **fields))
        names = [f"exclude {excluded:,} items"] * bool(excluded) + [f"allow {allow:,} SIDs"] * bool(allow)
        out.append(Filtered(", ".join(names), wave, legal[0]))
    return out


class _Judge:
    """Times waves against the unfiltered one, and compares the first request's list with the oracle's."""

    def __init__(self, engine: Engine, folder: Path, sids: NDArray[np.int32], plain: list[Request]) -> None:
        assert engine.catalog is not None
        assert engine.layout is not None
        self._engine = engine
        self._catalog = engine.catalog
        self._sids = sids
        self._vocabulary = sid_vocabulary(engine.layout)
        self._logits = Float64Logits(folder)
        self._plain = plain

    def check(self, filtered: Filtered) -> Check:
        """Judges the lists first, then the time."""
        wave = filtered.requests
        first = self._engine.generate(wave)[0]
        problem = self._against_oracle(wave[0], first.beams, filtered.legal)
        resolve_ms = 1e3 * _median_cpu(lambda: [resolve_filter(request, self._catalog) for request in wave]) / len(wave)
        # Alternating, so that a drift of the machine's clock falls on both.
        pairs = [(_cpu(lambda: self._engine.generate(self._plain)), _cpu(lambda: self._engine.generate(wave)))
                 for _ in range(_ROUNDS)]  # fmt: skip
        base, with_filter = (statistics.median(times) for times in zip(*pairs, strict=True))
        slow = f"resolving takes {resolve_ms:.1f} ms, above {RESOLVE_MS:g}" if resolve_ms > RESOLVE_MS else ""
        reason = problem or slow
        summary = (
            f"{len(first.beams)} beams as the float64 oracle ranks them; a wave of {len(wave)} requests takes "
            f"{with_filter / base:.2f} times the unfiltered one's CPU time ({1e3 * with_filter:.1f} and "
            f"{1e3 * base:.1f} ms, resolving and a model of {SHAPE} included); resolving {resolve_ms:.2f} ms per "
            "request on the host"
        )
        data = {"resolve_ms": resolve_ms, "wave_ms": 1e3 * with_filter, "unfiltered_wave_ms": 1e3 * base}
        outcome = Outcome.FAIL if reason else Outcome.PASS
        return Check("catalogs", f"filters: {filtered.name}", outcome, summary, reason=reason, data=data)

    def _against_oracle(self, request: Request, beams: Any, legal: NDArray[np.bool_]) -> str:
        """What is wrong with ``beams``; empty if nothing is."""
        grammar: Any = FilteredGrammar(self._sids[legal], self._vocabulary)
        oracle = Oracle(self._logits, lambda case: grammar)
        assert self._vocabulary.begin is not None
        case = SearchCase(
            name="filtered",
            prompt=(*request.input_ids, self._vocabulary.begin),
            n=request.n,
            beam_width=request.n,
            max_tokens=grammar.steps,
            space=ScoreSpace.SID,
            catalog="catalog",
        )
        observed = tuple(Hypothesis(beam.token_ids, beam.cumulative_logprob, beam.score) for beam in beams)
        if not {item for beam in beams for item in beam.items}.isdisjoint(request.exclude_items):
            return "a beam names an excluded item"
        found = explain(oracle, case, observed, _TIE)
        return "" if found.holds else found.reason


def _cpu(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started


def _median_cpu(action: Callable[[], object]) -> float:
    return statistics.median(_cpu(action) for _ in range(_ROUNDS))
