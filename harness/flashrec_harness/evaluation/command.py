"""``flashrec-harness eval``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from flashrec.console import make_console
from flashrec.request import ScoreSpace
from flashrec_harness import options as opt
from flashrec_harness.outcome import Check, SuiteContext
from flashrec_harness.report import terminal

_REPORTS = Path("reports")
_TRIE = {"on": (True,), "off": (False,), "both": (True, False)}

MakeContext = Callable[..., SuiteContext]
JudgeWith = Callable[..., None]
"""Runs one suite, writes its report and ends the process with its verdict."""


def add_to(app: typer.Typer, make_context: MakeContext, judge_with: JudgeWith) -> None:
    """Add the command to ``flashrec-harness``; the other two are how it makes a context and runs a suite."""
    console = make_console()

    @app.command(name="eval")
    def evaluate(
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        sequences: opt.Sequences = None,
        url: opt.Url = None,
        engine: Annotated[
            str, typer.Option("--engine", help="flashrec, transformers, a URL, or flashrec:dtype=bfloat16,...")
        ] = "flashrec",
        versus: Annotated[
            list[str] | None, typer.Option("--versus", help="An engine to compare with. May repeat.")
        ] = None,
        n: Annotated[int, typer.Option("--n", min=1, help="Recommendations per row, and the beam width.")] = 50,
        space: Annotated[
            ScoreSpace | None, typer.Option("--space", help="Score space. Default: sid; vocab with transformers.")
        ] = None,
        trie: Annotated[
            Literal["on", "off", "both"], typer.Option("--trie", help="Search within the catalog.")
        ] = "both",
        sample: Annotated[
            int | None, typer.Option("--sample", min=1, help="So many rows, drawn by --seed. Default: all.")
        ] = None,
        bound: Annotated[
            float, typer.Option("--bound", min=0, help="Difference in HR@10 and NDCG@10 that is none.")
        ] = 0.01,
        quick: opt.Quick = False,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        strict: opt.Strict = False,
        reports_dir: opt.ReportsDir = _REPORTS,
    ) -> None:
        """HR@k, recall@k and NDCG@k on held-out histories, the rates of invalid and repeated beams, and intervals."""
        from flashrec_harness.evaluation import suite
        from flashrec_harness.evaluation.engines import TRANSFORMERS, parse_engine
        from flashrec_harness.evaluation.gate import QUICK_ROWS

        specs = [parse_engine(url or engine), *map(parse_engine, versus or ())]
        with_transformers = any(spec.kind == TRANSFORMERS for spec in specs)
        settings = suite.EvalSettings(
            engine=specs[0],
            versus=specs[1:],
            n=n,
            space=space or (ScoreSpace.VOCAB if with_transformers else ScoreSpace.SID),
            trie=_TRIE[trie],
            sample=sample or (QUICK_ROWS if quick else None),
            bound=bound,
        )
        context = make_context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed)

        def judge(ctx: SuiteContext) -> list[Check]:
            checks = suite.run(ctx, settings)
            for check in checks:
                console.print(terminal.rows_table(check.name, check.rows))
            return checks

        judge_with("eval", context, reports_dir, strict=strict, function=judge)
