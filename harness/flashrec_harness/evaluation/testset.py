"""Held-out rows to judge by: prompts, what the user took next, and who the user was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import CatalogError
from flashrec.sid import Catalog, SidLayout
from flashrec_harness.material import Material, Prompt, load_material
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.prompts import PromptBuilder


@dataclass(frozen=True, slots=True)
class TestSet:
    """One entry per row: ``prompts``, without the begin token; ``items``, what the user took next; ``sids``, the
    same as rows of ``Catalog.sids``; ``users`` int64, equal for rows of one user. ``said`` tells how they were chosen.
    """

    __test__ = False

    material: Material
    prompts: list[Prompt]
    items: list[tuple[str, ...]]
    sids: list[tuple[int, ...]]
    users: NDArray[np.int64]
    said: str

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def catalog(self) -> Catalog:
        assert self.material.catalog is not None
        return self.material.catalog

    @property
    def layout(self) -> SidLayout:
        assert self.material.layout is not None
        return self.material.layout


def load_test_set(context: SuiteContext, sample: int | None = None) -> TestSet:
    """The context's held-out rows that have a target, or ``sample`` of them drawn by its seed.

    Raises :class:`CatalogError` without a catalog, without histories, or without one that has a target.
    """
    material = load_material(context)
    if material.catalog is None or material.layout is None:
        raise CatalogError("eval needs a catalog; name one with --sid-vocab-file")
    rows = [history for history in material.histories if history.targets]
    if not rows:
        raise CatalogError(f"{material.sequences}: no row has a target_item_id")
    said = f"all {len(rows):,} rows of {material.sequences.name}"
    if sample is not None and sample < len(rows):
        said = f"{sample:,} of {len(rows):,} rows of {material.sequences.name}, drawn by seed {context.seed}"
        drawn = np.random.default_rng(context.seed).choice(len(rows), sample, replace=False)
        rows = [rows[index] for index in np.sort(drawn)]
    builder = PromptBuilder(material.tokenizer, material.layout, material.catalog)
    _, users = np.unique([history.user for history in rows], return_inverse=True)
    return TestSet(
        material=material,
        prompts=builder.prompts([history.items for history in rows]),
        items=[tuple(map(builder.item, history.targets)) for history in rows],
        sids=[tuple(map(builder.rank, history.targets)) for history in rows],
        users=users.astype(np.int64),
        said=said,
    )
