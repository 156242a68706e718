"""The ledger diff names the first thing that differs in causal order, not the first in the record."""

from __future__ import annotations

import pytest

from flashrec.runtime.ledger import FIELDS
from flashrec_harness.determinism.ledger_diff import first_beam, first_divergence
from flashrec_harness.determinism.records import Ledger, OutputBeam


def ledger(steps: int = 3) -> Ledger:
    return [{name: 100 * step + place for place, name in enumerate(FIELDS)} for step in range(steps)]


def changed(*differences: tuple[int, str]) -> Ledger:
    out = ledger()
    for step, name in differences:
        out[step][name] += 1
    return out


ALL_SELECTED = ("parents", "tokens", "scores", "kv")


@pytest.mark.parametrize(
    ("differences", "step", "tensor", "kind"),
    [
        ([(0, "seq_lens"), (0, "kv"), (0, "logits"), (0, "tokens")], 0, "seq_lens", "input"),
        ([(0, "kv"), (0, "logits"), (0, "tokens"), (1, "kv")], 0, "kv", "input"),
        ([(0, "kv"), (0, "positions"), (0, "logits")], 0, "kv", "input"),
        ([(0, "positions"), (0, "logits"), (0, "tokens"), (1, "kv")], 0, "positions", "input"),
        ([(1, name) for name in ("positions", "logits", *ALL_SELECTED)], 1, "positions", "input"),
        ([(0, "logits"), (0, "tokens"), (0, "scores")], 0, "logits", "output"),
        ([(1, "kv"), (2, "logits"), (2, "tokens")], 1, "kv", "input"),
        ([(1, name) for name in ("logits", *ALL_SELECTED)], 1, "logits", "output"),
        ([(1, name) for name in ALL_SELECTED], 1, "parents", "output"),
        ([(2, "tokens")], 2, "tokens", "output"),
        ([(2, "scores")], 2, "scores", "output"),
        ([(1, "scores"), (2, "logits")], 1, "scores", "output"),
    ],
)
def test_first_in_causal_order(differences: list[tuple[int, str]], step: int, tensor: str, kind: str) -> None:
    found = first_divergence(ledger(), changed(*differences), "probe")
    assert found is not None
    assert (found.step, found.tensor, found.kind, found.request) == (step, tensor, kind, "probe")
    assert f"step {step}, request probe, tensor {tensor}" in str(found)


def test_equal_ledgers_do_not_diverge() -> None:
    assert first_divergence(ledger(), ledger(), "probe") is None


def test_first_beam_names_tokens_before_scores() -> None:
    one, two = OutputBeam((1, 2), "00000000", "00000000"), OutputBeam((3,), "00000000", "00000000")
    lower = OutputBeam((1, 2), "01000000", "01000000")
    assert first_beam([one, two], [one, two]) == "equal"
    assert "rank 2: tokens [3] became [1, 2]" in first_beam([one, two], [one, one])
    assert "rank 1: score bits 00000000 became 01000000" in first_beam([one], [lower])
    assert first_beam([one, two], [one]) == "2 beams became 1"
