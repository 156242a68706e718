"""From two ledgers of one request to the first thing that went differently (SPEC R3, HARNESS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flashrec_harness.determinism.records import Ledger, OutputBeam

_CAUSES = {
    "seq_lens": "the scheduler gave the pass another prompt or length",
    "positions": "a pass rotated its keys by other positions",
    "kv": "the cache, the page table or the ancestor links named other keys and values",
    "logits": "the forward pass computed other bits from the same inputs, or read keys and values that changed",
    "parents": "the selection chose other beams from the same logits",
    "tokens": "the selection chose other tokens from the same logits",
    "scores": "the selection summed other scores from the same logits",
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first record of ``request`` that differs, in causal order.

    ``kind`` is ``input`` where what the step was given differs (scheduler, cache, stale buffer) and ``output``
    where equal inputs gave different results.
    """

    step: int
    request: str
    tensor: str
    kind: Literal["input", "output"]

    def __str__(self) -> str:
        return f"step {self.step}, request {self.request}, tensor {self.tensor} ({self.kind}): {_CAUSES[self.tensor]}"


def first_divergence(expected: Ledger, observed: Ledger, request: str) -> Divergence | None:
    """Compare step by step: what a pass was given, its logits, then what was selected from them.

    A step's record holds ``kv`` *after* its selection: where parents or tokens differ as well it follows from the
    selection and is not named. At step 0 there is no lineage yet, so ``kv`` is the context alone; a page that holds
    another prompt holds other positions too, so ``kv`` is named before them. ``None`` where the ledgers agree.
    """
    for step, (want, got) in enumerate(zip(expected, observed, strict=True)):
        differs = {name for name in want if want[name] != got[name]}
        if not differs:
            continue
        tensor = _earliest(differs, step)
        return Divergence(step, request, tensor, "input" if tensor in ("seq_lens", "positions", "kv") else "output")
    return None


def _earliest(differs: set[str], step: int) -> str:
    follows = step > 0 and bool(differs & {"parents", "tokens"})
    order = ["seq_lens", *([] if follows else ["kv"]), "positions", "logits", "parents", "tokens", "scores", "kv"]
    return next(name for name in order if name in differs)


def first_beam(expected: Sequence[OutputBeam], observed: Sequence[OutputBeam]) -> str:
    """Where two outputs part, in one phrase: the rank, and tokens or score bits."""
    for rank, (want, got) in enumerate(zip(expected, observed, strict=False)):
        if want.token_ids != got.token_ids:
            return f"rank {rank + 1}: tokens {list(want.token_ids)} became {list(got.token_ids)}"
        if want != got:
            return f"rank {rank + 1}: score bits {want.cumulative_bits} became {got.cumulative_bits}"
    if len(expected) != len(observed):
        return f"{len(expected)} beams became {len(observed)}"
    return "equal"
