"""The soak: what it compares, what it counts, and that a leak and a wrong answer turn it red."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from flashrec.errors import ConfigError
from flashrec_harness.material import Material, load_material
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.planting import PLANT_VARIABLE
from flashrec_harness.soak import suite
from flashrec_harness.soak.cases import Case, digest, roster
from flashrec_harness.soak.suite import SoakSettings, run
from flashrec_harness.soak.traffic import Tally
from flashrec_harness.soak.watch import Held, Memory

SHOP = Path("engine/flashrec/assets/tiny-shop")
CLEAN = Held(requests=0, queued=0, lost_pages=0, pinned_pages=0, rows=0, usable_pages=512)


def context(directory: Path) -> SuiteContext:
    return SuiteContext(model_path=SHOP, sid_vocab_file=SHOP / "items.tsv", out_dir=directory)


@pytest.fixture(scope="module")
def material() -> Material:
    return load_material(context(Path()))


def test_the_roster_covers_every_endpoint_and_width_and_is_seeded(material: Material) -> None:
    cases = roster(material, 64, seed=0, longest=300)
    assert {case.path for case in cases} == {
        "/generate",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/recommend",
    }
    assert {1, 64} <= {case.n for case in cases}
    assert len({case.payload for case in cases}) == len(cases)
    assert cases == roster(material, 64, seed=0, longest=300)
    assert cases != roster(material, 64, seed=1, longest=300)
    bodies = [json.loads(case.payload) for case in cases]
    for field in ("stream", "exclude", "allow", "seed", "exclude_history", "constrained"):
        assert any(field in body for body in bodies), field


def test_a_checkpoint_without_histories_gets_items_of_its_catalog(material: Material) -> None:
    cases = roster(replace(material, sequences=Path("no/such/file")), 32, seed=0, longest=50)
    history = next(json.loads(case.payload)["history"] for case in cases if case.path == "/v1/recommend")
    assert material.catalog is not None
    assert set(history) <= set(material.catalog.items)
    assert len({case.payload for case in cases}) == 32


def answer(score: float, **changes: Any) -> bytes:
    return orjson.dumps({"id": "a", "created": 1, "choices": [{"index": 0, "score": score}], **changes})


def test_a_digest_leaves_out_what_two_answers_may_differ_in_and_nothing_else() -> None:
    plain = digest(answer(-0.1))
    assert digest(answer(-0.1, id="b", created=2)) == plain
    assert digest(answer(-0.1 - 2**-40)) != plain
    assert digest(answer(-0.1, model="other")) != plain
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
    warm = digest(answer(-0.1, usage=usage))
    usage["prompt_tokens_details"]["cached_tokens"] = 0
    assert digest(answer(-0.1, usage=usage)) == warm
    usage["prompt_tokens"] = 4
    assert digest(answer(-0.1, usage=usage)) != warm


def test_a_stream_is_digested_event_by_event() -> None:
    def stream(*scores: float) -> bytes:
        return b"".join(b"data: " + answer(score) + b"\n\n" for score in scores) + b"data: [DONE]\n\n"

    assert digest(stream(-0.1, -0.2)) == digest(stream(-0.1, -0.2))
    assert digest(stream(-0.1, -0.2)) != digest(stream(-0.2, -0.1))
    assert digest(stream(-0.1)) != digest(stream(-0.1, -0.1))


@pytest.mark.parametrize("name", ["requests", "queued", "lost_pages", "pinned_pages", "rows"])
def test_each_kind_of_leak_is_a_failure(name: str) -> None:
    leaking = Held(**{**{field: getattr(CLEAN, field) for field in CLEAN.__slots__}, name: 1})
    assert suite._no_leaks(CLEAN, CLEAN, 0).outcome is Outcome.PASS
    found = suite._no_leaks(CLEAN, leaking, 0)
    assert (found.outcome, found.reason) == (Outcome.FAIL, f"1 {name.replace('_', ' ')}")


def test_files_that_stay_open_are_a_failure() -> None:
    assert suite._no_leaks(CLEAN, CLEAN, 2).outcome is Outcome.PASS
    assert suite._no_leaks(CLEAN, CLEAN, 9).outcome is Outcome.FAIL


@pytest.mark.parametrize(("growth", "outcome"), [(0.0, "pass"), (-0.2, "pass"), (0.019, "pass"), (0.025, "fail")])
def test_memory_is_judged_after_the_warm_up(growth: float, outcome: str) -> None:
    """20 minutes: 500 MiB and a bump while warming up, then a steady climb by ``growth``, with bumps of reloads."""
    settings = SoakSettings(minutes=20)
    seconds = [float(second) for second in range(1, 1200)]
    climb = [500 * (1 + growth * max(0.0, second - 120) / 1080 / 0.8) for second in seconds]
    mib = [
        value + (300 if second < 100 else 0) + (60 if second % 12 == 0 else 0)
        for second, value in zip(seconds, climb, strict=True)
    ]
    found = suite._flat(Memory(seconds, mib), settings, pid=1)
    assert found.outcome == outcome, found.summary
    assert settings.warm_up_s == 120


def test_memory_of_another_process_or_of_a_short_run_is_not_judged() -> None:
    assert suite._flat(Memory([1.0], [1.0]), SoakSettings(), None).outcome is Outcome.NOT_RUN
    assert suite._flat(Memory([300.0], [1.0]), SoakSettings(), 1).outcome is Outcome.NOT_RUN


def test_the_short_form_samples_memory_often_enough_to_judge_it() -> None:
    for settings, every in ((SoakSettings(), 1.0), (suite.QUICK, suite.QUICK.seconds / 120)):
        assert settings.sample_s == every
        seconds = [every * number for number in range(1, int(settings.seconds / every))]
        found = suite._flat(Memory(seconds, [100.0 + second for second in seconds]), settings, pid=1)
        assert (found.outcome, found.name) == (Outcome.FAIL, f"memory is flat within {settings.flat:.0%}")


def test_a_load_without_what_it_promises_is_invalid() -> None:
    tally = Tally(compared=50)
    tally.statuses.update({"plain 200": 50, "cancel": 4, "deadline 504": 3, "mistake 400": 1, "flush 200": 1})
    assert suite._mixed(tally, SoakSettings(without=("reload",)), 20, reloads=True).outcome is Outcome.PASS
    unloaded = suite._mixed(tally, SoakSettings(), 20, reloads=True)
    assert (unloaded.outcome, unloaded.reason) == (Outcome.INVALID, "no reload happened")
    assert "shared a wave" in suite._mixed(tally, SoakSettings(without=("reload",)), 50, reloads=True).reason
    with pytest.raises(ConfigError, match="no 'tea'"):
        SoakSettings(without=("tea",))


def test_one_wrong_answer_is_a_failure() -> None:
    tally, case = Tally(), Case("x", "/generate", 4, b"{}")
    for _ in range(5):
        tally.compare(case, "same", "same")
    assert suite._right(tally, [case], []).outcome is Outcome.PASS
    assert suite._right(tally, [case], ["x"]).outcome is Outcome.FAIL
    tally.compare(case, "other", "same")
    assert suite._right(tally, [case], []).outcome is Outcome.FAIL


def verdicts(checks: list[Check]) -> dict[str, Outcome]:
    return {re.sub(" within.*", "", check.name): check.outcome for check in checks}


@pytest.mark.slow
def test_half_a_minute_on_the_bundled_checkpoint(tmp_path: Path) -> None:
    checks = run(context(tmp_path), SoakSettings(minutes=0.5))
    for check in checks:
        assert check.outcome is Outcome.PASS or "memory" in check.name, f"{check.name}: {check.reason}"
    assert checks[1].data["compared"] >= 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check", "share"),
    [
        ("page-leak-on-cancel", "nothing is held when nothing runs", 0.6),
        ("answers-swapped", "answers equal those given alone", 0.1),
    ],
)
def test_a_planted_fault_is_red(
    fault: str, check: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLANT_VARIABLE, fault)
    found = verdicts(run(context(tmp_path), SoakSettings(minutes=0.25, cases=24, cancelled=share)))
    assert found[check] is Outcome.FAIL
