"""Faults planted in the engine, or in what it returns, must each turn the verdict red (SPEC H4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashrec.request import Request, ScoreSpace
from flashrec.runtime import decode, results
from flashrec.search.expand import Expand, Expansion, select_expand
from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.cases import catalog_cases
from flashrec_harness.parity.compare import Agreement
from flashrec_harness.parity.comparison import Comparison
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.references.oracle import Oracle, explain
from flashrec_harness.references.types import RankedList, SearchCase

CATALOG = "4 levels"
Corrupt = Callable[[RankedList], RankedList]


def judge(edge: Ground, oracle: Oracle, cases: Sequence[SearchCase], corrupt: Corrupt | None = None) -> Comparison:
    """The engine's lists against the oracle's; ``corrupt`` spoils the widest of them.

    The engine's own check at start is off: it would refuse some of the faults before this suite sees them.
    """
    ours = EngineSubject(edge, invariance_check=False).search(cases)
    if corrupt is not None:
        spoilt = max(range(len(ours)), key=lambda index: len(ours[index]))
        ours[spoilt] = corrupt(ours[spoilt])
    return Comparison.of("control", cases, ours, oracle.search(cases), lambda *list_: explain(oracle, *list_))


def searches(edge: Ground, space: ScoreSpace, **fields: Any) -> list[SearchCase]:
    return catalog_cases(edge, space, 12, seed=4, catalog=CATALOG, **fields)


@pytest.mark.parametrize("space", list(ScoreSpace))
def test_the_engine_as_it_is_passes(edge: Ground, edge_oracle: Oracle, space: ScoreSpace) -> None:
    cases = searches(edge, space, filtered=True, penalties=(1.0, 0.5))
    outcome, reason = judge(edge, edge_oracle, cases).outcome()
    assert outcome is Outcome.PASS, reason


def plant(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Expand], Expand]) -> None:
    """Put ``spoil`` around the step that scores and selects."""
    monkeypatch.setattr(decode, "select_expand", lambda ops: spoil(select_expand(ops)))


def test_an_off_by_one_parent_is_caught(edge: Ground, edge_oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row goes on from the keys and values of its parent's neighbour."""

    def next_row(expand: Expand) -> Expand:
        def spoilt(*step: Any) -> Expansion:
            expansion = expand(*step)
            return replace(expansion, parent=(expansion.parent + 1).clamp(max=int(expansion.parent.max())))

        return spoilt

    plant(monkeypatch, next_row)
    assert judge(edge, edge_oracle, searches(edge, ScoreSpace.SID)).outcome()[0] is Outcome.FAIL


def test_raw_instead_of_masked_log_probabilities_are_caught(
    edge: Ground, edge_oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The normaliser of ``children`` runs over the whole level, as if nothing had been masked before it."""

    def unmasked(expand: Expand) -> Expand:
        return lambda logits, level, *rest: expand(logits, replace(level, normalise_legal=False), *rest)

    plant(monkeypatch, unmasked)
    assert judge(edge, edge_oracle, searches(edge, ScoreSpace.CHILDREN)).outcome()[0] is Outcome.FAIL


def test_a_dropped_allow_list_is_caught(edge: Ground, edge_oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    def unfiltered(expand: Expand) -> Expand:
        return lambda logits, level, frontier, spans, _filters, sampling: expand(
            logits, level, frontier, spans, None, sampling
        )

    plant(monkeypatch, unfiltered)
    comparison = judge(edge, edge_oracle, searches(edge, ScoreSpace.SID, filtered=True))
    assert comparison.outcome()[0] is Outcome.FAIL
    differing = {verdict.case.name for verdict in comparison.having(Agreement.DIFFERENT)}
    filtered = {v.case.name for v in comparison.verdicts if v.case.exclude or v.case.allow is not None}
    assert differing <= filtered, "a list without a filter differs too"
    assert len(differing) >= len(filtered) // 2


def test_a_wrong_length_penalty_is_caught(edge: Ground, edge_oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "penalised", lambda totals, lengths, penalty: totals / np.float32(lengths))
    comparison = judge(edge, edge_oracle, searches(edge, ScoreSpace.SID, penalties=(0.5,)))
    assert comparison.outcome()[0] is Outcome.FAIL
    assert "scores differ" in comparison.outcome()[1]


def test_an_ignored_score_space_is_caught(edge: Ground, edge_oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    true_request = EngineSubject.request

    def without_space(self: EngineSubject, case: SearchCase) -> Request:
        return replace(true_request(self, case), score_space=ScoreSpace.SID)

    monkeypatch.setattr(EngineSubject, "request", without_space)
    for space in (ScoreSpace.VOCAB, ScoreSpace.LEVEL, ScoreSpace.CHILDREN):
        assert judge(edge, edge_oracle, searches(edge, space)).outcome()[0] is Outcome.FAIL


def duplicated(ranked: RankedList) -> RankedList:
    return (ranked[0], ranked[0], *ranked[2:])


def illegal(ranked: RankedList) -> RankedList:
    """The last codes of the first two items, exchanged."""
    first, second = ranked[:2]
    return (
        replace(first, token_ids=(*first.token_ids[:-2], second.token_ids[-2], first.token_ids[-1])),
        replace(second, token_ids=(*second.token_ids[:-2], first.token_ids[-2], second.token_ids[-1])),
        *ranked[2:],
    )


def shortened(ranked: RankedList) -> RankedList:
    return ranked[:-1]


def padded(ranked: RankedList) -> RankedList:
    return (*ranked, replace(ranked[-1], token_ids=(0,) * len(ranked[-1].token_ids), score=-99.0))


def exchanged(ranked: RankedList) -> RankedList:
    """Two items in each other's place, the scores left where they were."""
    first, second = ranked[:2]
    return (
        replace(first, token_ids=second.token_ids),
        replace(second, token_ids=first.token_ids),
        *ranked[2:],
    )


@pytest.mark.parametrize("corrupt", [duplicated, illegal, shortened, padded, exchanged])
def test_a_spoilt_list_among_good_ones_is_caught(edge: Ground, edge_oracle: Oracle, corrupt: Corrupt) -> None:
    comparison = judge(edge, edge_oracle, searches(edge, ScoreSpace.SID), corrupt)
    assert comparison.outcome()[0] is Outcome.FAIL
    assert len(comparison.having(Agreement.DIFFERENT)) == 1
