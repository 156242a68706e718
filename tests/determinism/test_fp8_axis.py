"""FP8 weights in every row bucket: green as the engine is, red for a product that follows from its number of rows."""

from __future__ import annotations

import pytest
import torch
from random_shop import MakeTask

from flashrec.batch import Activation, Quantized
from flashrec.kernels.ops import Ops
from flashrec.layers.linear import Linear
from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.judge import judge
from flashrec_harness.determinism.worker import perform
from flashrec_harness.outcome import Check, Outcome

FEW_ROWS = 48


def _judged(make_task: MakeTask) -> Check:
    task = make_task("fp8")
    return next(check for check in judge([perform(task)], [task]) if check.name == AXES["fp8"].title)


def test_the_axis_is_green_and_its_products_were_fp8(make_task: MakeTask) -> None:
    check = _judged(make_task)
    assert check.outcome is Outcome.PASS, check.reason
    assert "1 engines with FP8 products" in check.summary


def test_a_product_that_follows_from_its_rows_is_red(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Linear.__call__

    def by_rows(self: Linear, x: Activation, ops: Ops) -> torch.Tensor:
        """Above 48 rows an FP8 product adds up K in two halves."""
        if self.weight_scale is None:
            return real(self, x, ops)
        values, scale = x if isinstance(x, Quantized) else ops.quant_per_token(x)
        if values.shape[0] <= FEW_ROWS:
            return real(self, Quantized(values, scale), ops)
        half = values.shape[1] // 2
        products = [
            ops.linear_fp8(
                values[:, part].contiguous(), scale, self.weight[:, part].contiguous(), self.weight_scale, self.dtype
            )
            for part in (slice(None, half), slice(half, None))
        ]
        return torch.add(*products)

    monkeypatch.setattr(Linear, "__call__", by_rows)
    check = _judged(make_task)
    assert check.outcome is Outcome.FAIL
    assert any("tensor logits " in row["cause"] for row in check.rows)
