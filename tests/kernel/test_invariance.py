"""A row's bits do not depend on its neighbours; a product that splits K by M is caught."""

from __future__ import annotations

import torch

from flashrec_harness import kernel_invariance
from flashrec_harness.kernel_invariance import rows_that_differ
from flashrec_harness.kernels_suite import lanes
from flashrec_harness.outcome import Outcome


def test_rows_are_invariant_on_every_lane() -> None:
    for check in kernel_invariance.run(lanes()):
        assert check.outcome is Outcome.PASS, f"{check.name}: {check.reason}"


def test_a_split_count_chosen_from_the_batch_is_caught() -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 512, generator=generator), torch.randn(32, 512, generator=generator)

    def split_by_batch(rows: slice) -> torch.Tensor:
        part = x[rows]
        splits = 4 if part.shape[0] <= 16 else 1
        return sum(
            (a @ b.T for a, b in zip(part.chunk(splits, 1), w.chunk(splits, 1), strict=True)),
            start=torch.zeros(part.shape[0], 32),
        )

    assert rows_that_differ(split_by_batch, split_by_batch(slice(0, 64)), [16])
