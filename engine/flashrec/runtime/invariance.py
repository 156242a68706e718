"""The proof at start-up that a request's bits do not depend on its wave (SPEC R1, DESIGN's rules).

Matrix libraries choose reductions by shape: on one machine a row's bits are the same in every batch, on
another they are not. An engine that would drift says so before it serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flashrec.errors import EngineFault
from flashrec.request import Request, Result

if TYPE_CHECKING:
    from flashrec.runtime.engine import Engine

PROBE_TOKENS = 37
MATES = (1, 16, 70, 5, 33)
"""Prompt lengths of the requests that share the probe's wave: below, at and above a page and a row tile."""


def prove_invariance(engine: Engine) -> None:
    """Run a probe alone, among mates, and from a warm cache, and compare tokens and score bits.

    Raises:
        EngineFault: they differ; the message says between which runs, and what to set.
    """
    longest = engine.parts.limits.max_context - 1
    probe = _request(engine, "probe", min(PROBE_TOKENS, longest), width=3, seed=0)
    mates = [
        _request(engine, f"mate-{index}", min(length, longest), width=2 + index, seed=1 + index)
        for index, length in enumerate(MATES)
    ]
    (alone,) = engine.generate([probe])
    engine.flush_cache()
    runs = {"among mates": engine.generate([*mates[:2], probe, *mates[2:]])[2]}
    runs["from a warm cache"] = engine.generate([probe])[0]
    engine.flush_cache()
    for name, result in runs.items():
        if result.beams != alone.beams:
            raise EngineFault(
                f"invariance check: a request gives other bits {name} than alone ({_difference(alone, result)}); "
                f"a matrix product on this machine depends on its batch: {_advice(engine)}. "
                "--no-invariance-check starts anyway"
            )


def _request(engine: Engine, rid: str, length: int, *, width: int, seed: int) -> Request:
    vocab = engine.model_config.vocab_size
    ids = np.random.default_rng(seed).integers(0, vocab, max(length, 1))
    width = min(width, engine.config.max_beam_width, max(1, vocab // 2))
    steps = None if engine.catalog is not None else min(2, engine.config.max_decode_steps)
    return Request(input_ids=tuple(ids.tolist()), n=width, max_tokens=steps, ignore_eos=True, rid=rid)


def _advice(engine: Engine) -> str:
    if engine.parts.device.type == "cpu":
        return "set cpu_threads=1, or report the device"
    if engine.config.compute_dtype.itemsize == 4:
        return "float32 attention on a GPU is plain PyTorch, which makes no promise; serve --dtype bfloat16"
    return "report the device"


def _difference(a: Result, b: Result) -> str:
    for rank, (one, other) in enumerate(zip(a.beams, b.beams, strict=False)):
        if one != other:
            return f"rank {rank}: {one.token_ids} {one.score!r} against {other.token_ids} {other.score!r}"
    return f"{len(a.beams)} beams against {len(b.beams)}"
