"""``flashrec-harness golden``: did any bit change between two commits, and where?"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrec.command_line import make_app
from flashrec.console import make_console
from flashrec_harness import options as opt
from flashrec_harness.outcome import ExitCode, SuiteContext
from flashrec_harness.report.terminal import rows_table
from flashrec_harness.targets import resolve_catalog, resolve_model

if TYPE_CHECKING:
    from flashrec_harness.determinism.golden import Golden

app = make_app("golden", "Golden digests: did any bit change between two commits, and where?")
_console = make_console()

Digests = Annotated[Path, typer.Argument(help="A run's directory or its golden.json.", exists=True)]
Directory = Annotated[Path, typer.Option("--directory", help="Where golden digests are kept.")]


def _file(path: Path) -> Path:
    """A run of one suite holds the file itself, one of several suites in its ``determinism`` folder."""
    choices = [path, path / "golden.json", path / "determinism" / "golden.json"]
    return next((choice for choice in choices if choice.is_file()), choices[1])


@app.command()
def compare(before: Digests, after: Digests) -> None:
    """Compare two runs' digests. Exit code 1 if a bit changed, 4 if the two cannot be compared."""
    from flashrec_harness.determinism import golden

    _conclude(golden.load(_file(before)), golden.load(_file(after)))


@app.command()
def between(
    before: Annotated[str, typer.Argument(help="The older git revision.")],
    after: Annotated[
        str | None, typer.Argument(help="The newer one. Default: the working tree.", show_default=False)
    ] = None,
    model_path: opt.ModelPath = None,
    sid_vocab_file: opt.SidVocabFile = None,
    sid: opt.Sid = None,
    quick: opt.Quick = False,
) -> None:
    """Run the probes with the engines of two commits, each in a work tree, and compare. Exit codes as `compare`."""
    from flashrec_harness.determinism import golden
    from flashrec_harness.worktrees import Repository

    repository = Repository.around()
    revisions = [repository.resolve(before), repository.resolve(after) if after else repository.snapshot()]
    model = resolve_model(model_path)
    with tempfile.TemporaryDirectory(prefix="flashrec-golden-") as directory:
        context = SuiteContext(
            model_path=model,
            sid_vocab_file=resolve_catalog(model, sid_vocab_file),
            sid=sid,
            quick=quick,
            out_dir=Path(directory),
        )
        old, new = (golden.at_revision(repository, revision, context) for revision in revisions)
    _conclude(old, new)


@app.command()
def keep(
    run: Digests,
    directory: Directory = Path("baselines") / "golden",
) -> None:
    """Store a run's digests as those of its device and checkpoint: later runs are compared with them."""
    from flashrec_harness.determinism import golden

    found = golden.load(_file(run))
    _console.print(f"kept {found.write(directory / found.stored_at)}", markup=False, soft_wrap=True)


def _conclude(old: Golden, new: Golden) -> None:
    from flashrec_harness.determinism import golden
    from flashrec_harness.environment import differing_keys

    refused = differing_keys(dict(old.inputs), dict(new.inputs))
    for key, (left, right) in refused.items():
        _console.print(f"not comparable: {key} is {left!r} before and {right!r} after", markup=False, soft_wrap=True)
    if not new.probes and not old.probes:
        _console.print(f"not comparable: {old.commit} and {new.commit} have no probes", markup=False)
    if refused or not (new.probes or old.probes):
        raise typer.Exit(ExitCode.UNDECIDED)
    if rows := golden.changes(old, new):
        _console.print(rows_table("changed bits", [dict(row) for row in rows]))
    _console.print(
        f"{len(rows)} of {len(new.probes)} probes changed a bit between {old.commit} and {new.commit}", markup=False
    )
    if rows and (software := differing_keys(dict(old.made_with), dict(new.made_with))):
        _console.print(f"made with other software: {', '.join(software)}", markup=False)
    raise typer.Exit(ExitCode.FAILED if rows else ExitCode.OK)
