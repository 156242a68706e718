"""FP8 weights in every row bucket: green as the engine is. What makes it red is among the planted faults."""

from __future__ import annotations

from random_shop import MakeTask

from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.judge import judge
from flashrec_harness.determinism.worker import perform
from flashrec_harness.outcome import Outcome


def test_the_axis_is_green_and_its_products_were_fp8(make_task: MakeTask) -> None:
    task = make_task("fp8")
    check = next(check for check in judge([perform(task)], [task]) if check.name == AXES["fp8"].title)
    assert check.outcome is Outcome.PASS, check.reason
    assert "1 engines with FP8 products" in check.summary
