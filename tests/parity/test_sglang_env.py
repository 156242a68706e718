"""SGLang's environment: named, cached, or made; and why not, in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashrec_harness import sglang_env
from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.answers import ask_sglang
from flashrec_harness.parity.cases import for_sglang
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.types import SearchCase
from flashrec_harness.sglang_env import SglangUnavailableError, sglang_python


@pytest.fixture
def nothing_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(sglang_env.PYTHON_VARIABLE, raising=False)
    monkeypatch.delenv(sglang_env.URL_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flashrec"


def test_a_named_interpreter_must_exist_and_import_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang_env.PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(SglangUnavailableError, match="/nowhere/python: no such interpreter"):
        sglang_python()
    monkeypatch.setenv(sglang_env.PYTHON_VARIABLE, sys.executable)
    with pytest.raises(SglangUnavailableError, match="SGLang does not import"):
        sglang_python()


def test_a_cached_environment_is_taken_as_it_is(nothing_named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SglangUnavailableError, match="none may be made"):
        sglang_python(create=False)
    monkeypatch.setattr(sglang_env, "_environment_key", lambda: "key")
    home = nothing_named / "sglang-key"
    home.mkdir(parents=True)
    (home / "ready.json").write_text("{}", encoding="utf-8")
    assert sglang_python() == home / "bin" / "python"


def test_a_failed_installation_says_why_and_leaves_nothing_that_looks_ready(
    nothing_named: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    impossible = tmp_path / "requirements.txt"
    impossible.write_text("no-such-package-for-flashrec==1.0\n", encoding="utf-8")
    monkeypatch.setattr(sglang_env, "_REQUIREMENTS", impossible)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SglangUnavailableError, match=r"could not install its packages: .*no-such-package") as caught:
        sglang_python()
    assert "\n" not in str(caught.value)
    assert not list(nothing_named.glob("*/ready.json"))


def test_the_environment_is_remade_when_its_requirements_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = sglang_env._environment_key()
    other = tmp_path / "requirements.txt"
    other.write_text("sglang==0\n", encoding="utf-8")
    monkeypatch.setattr(sglang_env, "_REQUIREMENTS", other)
    assert sglang_env._environment_key() != before


def test_every_requirement_is_pinned_and_no_registry_is_named() -> None:
    lines = sglang_env._REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    assert all("==" in line and "/" not in line and not line.startswith("-") for line in lines)
    assert sglang_env._pinned("torch").startswith("torch==")


def test_without_sglang_the_checks_are_not_run_and_say_why(
    edge: Ground, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(sglang_env.URL_VARIABLE, raising=False)
    monkeypatch.setenv(sglang_env.PYTHON_VARIABLE, "/nowhere/python")
    cases = for_sglang([SearchCase(name="free", prompt=(1,), n=2, beam_width=2, max_tokens=1)])
    absence = ask_sglang(edge, cases, tmp_path).absence(cases)
    assert absence is not None
    assert absence.outcome is Outcome.NOT_RUN
    assert "/nowhere/python" in absence.reason


def test_a_named_server_that_is_gone_makes_the_checks_invalid(
    edge: Ground, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(sglang_env.URL_VARIABLE, "http://127.0.0.1:9")
    free = SearchCase(name="free", prompt=(1,), n=2, beam_width=2, max_tokens=1)
    within = SearchCase(name="in", prompt=(1,), n=2, beam_width=2, max_tokens=1, catalog="3 levels")
    answers = ask_sglang(edge, [free, within], tmp_path)
    gone, foreign = answers.absence([free]), answers.absence([within])
    assert gone is not None
    assert gone.outcome is Outcome.INVALID
    assert foreign is not None
    assert foreign.outcome is Outcome.NOT_RUN
    assert sglang_env.URL_VARIABLE in foreign.reason
