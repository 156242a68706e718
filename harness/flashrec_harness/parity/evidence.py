"""What a failing comparison leaves behind: the lists side by side, and bundles that replay them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.parity.compare import Agreement, ListVerdict
from flashrec_harness.parity.comparison import Comparison, side_by_side
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.repro import save_bundle
from flashrec_harness.targets import display_path

_BUNDLES = 3


def save_evidence(comparison: Comparison, check: Check, subject: object, out_dir: Path) -> None:
    """Write every differing list to ``out_dir``, replay the first ones alone, and name the bundles in ``check``."""
    differing = [v for v in comparison.verdicts if v.agreement not in (Agreement.EQUAL, Agreement.NEAR_TIE)]
    if check.outcome is Outcome.PASS or not differing:
        return
    slug = "-".join("".join(c if c.isalnum() else " " for c in comparison.name).split())
    listing = out_dir / f"{slug}.json"
    listing.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"case": v.case.name, "reason": v.reason, "lists": side_by_side(v)} for v in differing]
    listing.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    check.data["listing"] = str(listing)
    if isinstance(subject, EngineSubject):
        bundles = [_bundle(v, comparison.name, subject, out_dir / "repro") for v in differing[:_BUNDLES]]
        check.bundles = [display_path(path) for path in bundles]


def _bundle(verdict: ListVerdict, name: str, subject: EngineSubject, directory: Path) -> Path:
    """The request, run once more, alone and with its ledger, beside what the reference has."""
    case = verdict.case
    engine = subject.engine((case.catalog, case.score_end), record_ledger=True)
    (result,) = engine.generate([subject.request(case)])
    return save_bundle(
        directory / f"{case.name}.json",
        suite="parity",
        reason=f"{name}: {verdict.reason}",
        request=subject.request(case),
        config=engine.config,
        result=result,
        expected=[{"token_ids": list(h.token_ids), "score": h.score} for h in verdict.theirs],
        ledger=[asdict(digest) for digest in engine.ledgers.get(result.rid, ())],
    )
