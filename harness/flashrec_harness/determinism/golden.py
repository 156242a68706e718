"""Golden digests: the probes' bits on one device, kept beside a commit (SPEC H3b).

``python -m flashrec_harness.determinism.golden compare A B`` says whether any bit changed between two commits
and where; ``keep RUN`` stores a run's digests for its device, and the suite compares later runs with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flashrec_harness import environment
from flashrec_harness.determinism.judge import SUITE, Evidence
from flashrec_harness.determinism.ledger_diff import first_beam, first_divergence
from flashrec_harness.determinism.records import Ledger, OutputBeam
from flashrec_harness.environment import Environment, differing_keys
from flashrec_harness.hardware import device_slug
from flashrec_harness.outcome import Check, Outcome, SuiteContext

SCHEMA = 1
FILE = "golden.json"
DIRECTORY = Path("baselines") / "golden"


class GoldenError(ValueError):
    """A file of golden digests is malformed."""


@dataclass(frozen=True, slots=True)
class ProbeBits:
    """One probe's beams and its ledger."""

    beams: tuple[OutputBeam, ...]
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Golden:
    """``inputs`` must be equal for a comparison (device, model, catalog, requests); ``made_with`` says with what
    software, and ``commit`` at which commit."""

    commit: str
    inputs: Mapping[str, Any]
    made_with: Mapping[str, Any]
    probes: Mapping[str, ProbeBits]

    def write(self, path: Path) -> Path:
        """As JSON with sorted keys, so that a change reads well as a diff."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True) + "\n", "utf-8")
        return path

    @property
    def stored_at(self) -> Path:
        """Where the digests of this device and checkpoint are kept, below ``baselines/golden``."""
        return Path(device_slug(str(self.inputs["device"]))) / f"{self.inputs['model']}.json"


def environment_of(context: SuiteContext) -> Environment:
    """Device, checkpoint and software of a run."""
    return environment.collect(model_path=context.model_path, sid_vocab_file=context.sid_vocab_file)


def collect(evidence: Evidence, where: Environment, requests_digest: str) -> Golden:
    """The references of a run that did not drift."""
    probes = {
        name: ProbeBits(
            seen.report.outputs[seen.observation.output], seen.report.ledgers.get(seen.observation.ledger, [])
        )
        for name, seen in evidence.reference.items()
    }
    threads = evidence.reports[0].threads if where.hard.get("device_memory_mib") is None else None
    inputs = {key: where.hard.get(key) for key in ("device", "model", "catalog")}
    return Golden(
        where.commit.label, {**inputs, "requests": requests_digest, "threads": threads}, dict(where.soft), probes
    )


def load(path: Path) -> Golden:
    """Read golden digests. Raises :class:`GoldenError` if they are none."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.pop("schema") != SCHEMA:
            raise GoldenError(f"{path}: not golden digests of schema {SCHEMA}")
        probes = {
            name: ProbeBits(
                tuple(OutputBeam(**{**beam, "token_ids": tuple(beam["token_ids"])}) for beam in bits["beams"]),
                bits["ledger"],
            )
            for name, bits in body["probes"].items()
        }
        return Golden(body["commit"], body["inputs"], body["made_with"], probes)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"{path}: not golden digests ({type(error).__name__}: {error})") from None


def changes(before: Golden, after: Golden) -> list[dict[str, str]]:
    """Which probes' bits differ, with the first record of each that does; a probe of one side only counts."""
    found = []
    for name in sorted(before.probes.keys() | after.probes.keys()):
        old, new = before.probes.get(name), after.probes.get(name)
        if old is None or new is None:
            side = "newer" if old is None else "older"
            found.append({"probe": name, "where": f"only in the {side}", "first": ""})
        elif old != new:
            same_shape = len(old.ledger) == len(new.ledger)
            cause = first_divergence(old.ledger, new.ledger, name) if same_shape else "another number of steps"
            where = str(cause or "after the ledger")
            found.append({"probe": name, "where": where, "first": first_beam(old.beams, new.beams)})
    return found


def against_stored(current: Golden, directory: Path = DIRECTORY) -> Check:
    """Compare with the digests kept for this device and checkpoint, if there are any."""
    name = "golden digests"
    path = directory / current.stored_at
    if not path.is_file():
        reason = f"no golden digests for this device ({current.inputs['device']}) and checkpoint"
        summary = f"{len(current.probes)} probes recorded in {FILE}"
        return Check(SUITE, name, Outcome.NOT_RUN, summary, reason=reason)
    stored = load(path)
    refused = differing_keys(dict(stored.inputs), dict(current.inputs))
    if refused:
        return Check(SUITE, name, Outcome.NOT_RUN, "not comparable", reason=f"other inputs: {', '.join(refused)}")
    rows = changes(stored, current)
    software = differing_keys(dict(stored.made_with), dict(current.made_with))
    check = Check(
        SUITE,
        name,
        Outcome.INCONCLUSIVE if rows else Outcome.PASS,
        f"{len(rows)} of {len(current.probes)} probes changed a bit since {stored.commit}",
        rows=[dict(row) for row in rows],
    )
    if rows and software:
        check.outcome, check.reason = Outcome.NOT_RUN, f"made with other software: {', '.join(software)}"
    elif rows:
        check.reason = f"{rows[0]['probe']}: {rows[0]['where']}; keep the new digests if this is meant"
    return check


app = typer.Typer(help="Golden digests: did any bit change between two commits, and where?", no_args_is_help=True)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Golden digests of the older commit.", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(help="Those of the newer commit.", exists=True, dir_okay=False)],
) -> None:
    """Exit code 1 if a bit changed, 4 if the two cannot be compared."""
    old, new = load(before), load(after)
    refused = differing_keys(dict(old.inputs), dict(new.inputs))
    for key, (left, right) in refused.items():
        typer.echo(f"not comparable: {key} is {left} and {right}")
    if refused:
        raise typer.Exit(4)
    rows = changes(old, new)
    for row in rows:
        typer.echo(f"{row['probe']}: {row['where']}; {row['first']}")
    typer.echo(f"{len(rows)} of {len(new.probes)} probes changed a bit between {old.commit} and {new.commit}")
    raise typer.Exit(1 if rows else 0)


@app.command()
def keep(
    run: Annotated[Path, typer.Argument(help="A run's determinism directory or its golden.json.", exists=True)],
    directory: Annotated[Path, typer.Option("--directory", help="Where golden digests are kept.")] = DIRECTORY,
) -> None:
    """Store a run's digests as those of its device and checkpoint."""
    golden = load(run / FILE if run.is_dir() else run)
    typer.echo(f"kept {golden.write(directory / golden.stored_at)}")


if __name__ == "__main__":
    app()
