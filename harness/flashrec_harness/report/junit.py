"""JUnit XML, as CI systems read it."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report.model import RunReport

_TAGS = {
    Outcome.FAIL: "failure",
    Outcome.INVALID: "error",
    Outcome.INCONCLUSIVE: "error",
    Outcome.NOT_RUN: "skipped",
    Outcome.KNOWN: "skipped",
}


def _case(check: Check) -> ET.Element:
    case = ET.Element("testcase", classname=f"flashrec.{check.suite}", name=check.name)
    case.set("time", f"{check.seconds or 0:.3f}")
    tag = _TAGS.get(check.outcome)
    if tag is not None:
        detail = ET.SubElement(case, tag, message=check.reason or check.summary)
        if tag != "skipped":
            detail.set("type", check.outcome)
            detail.text = "\n".join(filter(None, [check.summary, check.repeat]))
    ET.SubElement(case, "system-out").text = check.summary
    return case


def render(report: RunReport) -> bytes:
    """``junit.xml``: fail is a failure, invalid and inconclusive are errors, not run is a skip."""
    root = ET.Element("testsuites", name=f"flashrec {report.title}", time=f"{report.seconds:.3f}")
    groups = ({"acceptance": report.lines} if report.lines else {}) | report.suites
    for name, checks in groups.items():
        tags = [_TAGS.get(check.outcome) for check in checks]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(checks)),
            failures=str(tags.count("failure")),
            errors=str(tags.count("error")),
            skipped=str(tags.count("skipped")),
            timestamp=report.started.isoformat(timespec="seconds"),
        )
        suite.extend(_case(check) for check in checks)
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document
