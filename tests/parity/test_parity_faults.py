"""The registered faults that give the same wrong answer every time: the oracle sees them."""

from __future__ import annotations

from types import ModuleType

import pytest
from test_negative_controls import judge, searches

from flashrec.request import ScoreSpace
from flashrec_harness.outcome import Outcome
from flashrec_harness.parity import plan
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.plan import QUICK, Reference
from flashrec_harness.references.oracle import Oracle

PARITY_FAULTS = ("allow-list-ignored", "duplicated-beam", "illegal-sid", "parents-off-by-one-at-one-width")


def test_every_parity_fault_is_tried_here(faults: ModuleType) -> None:
    named = {f.name for f in faults.FAULTS.values() for catch in f.catches if catch.suite == "parity"}
    assert named == set(PARITY_FAULTS)


@pytest.mark.parametrize("name", PARITY_FAULTS)
def test_the_fault_is_caught(name: str, faults: ModuleType, edge: Ground, edge_oracle: Oracle) -> None:
    with faults.plant(name):
        comparison = judge(edge, edge_oracle, searches(edge, ScoreSpace.SID, filtered=True))
    assert comparison.outcome()[0] is Outcome.FAIL


def test_only_narrows_groups_and_their_references(edge: Ground) -> None:
    groups = plan.edge_groups(edge, QUICK, 0)
    assert plan.narrowed(groups, None) == groups
    (sid,) = plan.narrowed(groups, "float64 oracle, sid")
    assert (sid.space, sid.references) == (ScoreSpace.SID, (Reference.ORACLE,))
    assert {group.references for group in plan.narrowed(groups, "SGLang, ")} == {(Reference.SGLANG,)}
    assert plan.narrowed(groups, "nonsense") == []
