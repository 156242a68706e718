"""The command line's shared options, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelPath = Annotated[
    Path | None,
    typer.Option("--model-path", help="Checkpoint directory. Default: the bundled tiny shop.", show_default=False),
]
SidVocabFile = Annotated[
    Path | None,
    typer.Option(
        "--sid-vocab-file",
        help="Catalog. Default: the one in the checkpoint's directory.",
        show_default=False,
    ),
]
Sid = Annotated[str | None, typer.Option("--sid", help="Layout START:END/SIZE,SIZE,... where it cannot be inferred.")]
Sequences = Annotated[
    Path | None,
    typer.Option("--sequences", help="CSV of held-out histories. Default: the checkpoint's test.csv."),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Judge a running server, http://HOST:PORT: ours; SGLang, but not by soak; one with OpenAI's "
        "/v1/completions alone by determinism and perf.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="The short form: fewer cases, same rules.")]
RequireGpu = Annotated[
    bool, typer.Option("--require-gpu", envvar="FLASHREC_REQUIRE_GPU", help="A missing GPU is a failure.")
]
Only = Annotated[
    str | None,
    typer.Option("--only", help="Narrow the suite: a kernel's name, a reference and score space, an axis."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the suites' random choices.")]
Strict = Annotated[bool, typer.Option("--strict", "--strict-harness", help="What is not run counts as a failure.")]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget",
        envvar="FLASHREC_BUDGET_MINUTES",
        min=0.01,
        help="Minutes a suite may take; one that needs more is inconclusive.",
        show_default=False,
    ),
]
ReportsDir = Annotated[
    Path,
    typer.Option("--reports-dir", envvar="FLASHREC_REPORTS_DIR", help="Reports go to DIR/<run-id>/<suite>/."),
]
BaselinesDir = Annotated[Path, typer.Option("--baselines-dir", help="Stored baselines.")]
