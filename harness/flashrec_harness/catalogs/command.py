"""``flashrec-harness catalogs``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flashrec_harness import options as opt
from flashrec_harness.outcome import SuiteContext

_REPORTS = Path("reports")
_SIZES = [1_500_000, 20_000_000]


def add_to(app: typer.Typer, make_context: Callable[..., SuiteContext], judge_with: Callable[..., None]) -> None:
    """Add the command to ``flashrec-harness``; the other two are how it makes a context and runs a suite."""

    @app.command()
    def catalogs(
        sids: Annotated[list[int], typer.Option("--sids", min=1, help="Semantic IDs. May repeat.")] = _SIZES,
        seed: opt.Seed = 0,
        reports_dir: opt.ReportsDir = _REPORTS,
    ) -> None:
        """What random catalogs over 3 x 8,192 and their filters cost: seconds and bytes against their bounds."""
        from flashrec_harness.catalogs import suite

        context = make_context(None, None, None, None, None, False, False, seed)
        judge_with("catalogs", context, reports_dir, strict=False, function=lambda ctx: suite.run(ctx, sids))
