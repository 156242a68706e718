"""Golden digests: the probes' bits on one device, kept beside a commit (SPEC H3b).

``flashrec-harness golden`` compares those of two files or commits and keeps a run's for its device; the suite
compares later runs with what is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrec.errors import FlashRecError
from flashrec_harness import environment
from flashrec_harness.children import run_module
from flashrec_harness.determinism.judge import SUITE, Evidence
from flashrec_harness.determinism.ledger_diff import first_beam, first_divergence
from flashrec_harness.determinism.records import Ledger, OutputBeam, ProcessReport
from flashrec_harness.determinism.task import make_tasks, suite_prompts
from flashrec_harness.environment import Commit, Environment, differing_keys
from flashrec_harness.hardware import device_slug
from flashrec_harness.material import load_material, prompts_digest
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.worktrees import Repository, Revision, python_path

SCHEMA = 1
FILE = "golden.json"
DIRECTORY = Path("baselines") / "golden"
_PROCESS_TIMEOUT_S = 1800.0


class GoldenError(FlashRecError):
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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


def at_revision(repository: Repository, revision: Revision, context: SuiteContext) -> Golden:
    """The bits that the engine of a commit gives the probes alone, in one process, under this harness."""
    prompts = suite_prompts(context, load_material(context))
    (task, *_) = make_tasks(context, prompts, ("alone",), frozenset({"alone"}))
    prefix = context.out_dir / f"golden-{revision.sha[:9]}"
    task_file, report_file = prefix.with_suffix(".task.json"), prefix.with_suffix(".report.json")
    context.out_dir.mkdir(parents=True, exist_ok=True)
    task_file.write_text(json.dumps(asdict(task)), encoding="utf-8")
    with repository.checkout(revision.sha) as tree:
        run_module(
            "flashrec_harness.determinism.worker",
            [str(task_file), str(report_file)],
            log=prefix.with_suffix(".log"),
            timeout_s=_PROCESS_TIMEOUT_S,
            env={"PYTHONPATH": python_path(tree)},
        )
    where = environment_of(context)
    where.commit = Commit(revision.sha, False)
    return collect(Evidence([ProcessReport.read(report_file)]), where, f"{prompts_digest(prompts)}-n{task.width}")
