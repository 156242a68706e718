"""A report that has one of everything, for the tests of the writers."""

from __future__ import annotations

from datetime import UTC, datetime

from flashrec_harness.environment import Commit, Environment
from flashrec_harness.outcome import Band, Check, Outcome, Plot, Series
from flashrec_harness.report.model import RunReport

HOSTILE = "<script>alert('n & m')</script>"


def plot() -> Plot:
    return Plot(
        title="throughput, n=10",
        x_label="process",
        y_label="requests/s",
        series=[
            Series("rounds", [0.0, 0.1, 1.0, 1.1], [101.0, 99.0, 104.0, 97.5], faint=True),
            Series("process medians", [0.0, 1.0], [100.0, 101.5]),
        ],
        bands=[Band(98.0, 103.0, "noise band")],
        x_ticks=["1", "2"],
    )


def checks() -> dict[str, list[Check]]:
    return {
        "parity": [
            Check(
                "parity",
                "float32 against transformers",
                Outcome.PASS,
                "212 lists equal, largest score error 3.1e-06, 1 tie flip listed",
                rows=[{"n": 1, "lists": 53, "outcome": Outcome.PASS}, {"n": 64, "lists": 53, "outcome": "fail"}],
            ),
            Check(
                "parity",
                "float32 against SGLang",
                Outcome.FAIL,
                "59 of 60 lists equal",
                reason="prompt 17, n = 8: rank 3 differs by 2.0e-02",
                repeat="python -m flashrec_harness parity --model-path shop --seed 7",
            ),
        ],
        "perf": [
            Check("perf", "measurement is valid", Outcome.INVALID, "1 rule broken", reason=HOSTILE),
            Check("perf", "figures n=10", Outcome.PASS, "100 req/s", plots=[plot()], seconds=2.5),
            Check("perf", "against baseline", Outcome.NOT_RUN, "", reason="no baseline for this device"),
            Check("perf", "against baseline n=10", Outcome.INCONCLUSIVE, "3 % outside", reason="decide with pairs"),
        ],
    }


def report(suites: dict[str, list[Check]] | None = None) -> RunReport:
    return RunReport(
        run_id="20261129-194200-1a2b3c4d5",
        title="accept",
        command="python -m flashrec_harness accept --quick",
        started=datetime(2026, 11, 29, 19, 42, tzinfo=UTC),
        seconds=95.2,
        environment=Environment(
            Commit("1a2b3c4d5e6f", False, "subject"), {"device": "NVIDIA H200"}, {"torch": "2.11.0"}, {"x": None}
        ),
        suites=checks() if suites is None else suites,
    )
