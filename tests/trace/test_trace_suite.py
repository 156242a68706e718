"""The trace suite on the bundled checkpoint: a server, ``/start_profile``, a judged trace and its picture."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from rich.console import Console
from trace_maker import TraceMaker, write

from flashrec_harness import hardware, traces
from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.tracing.checks import Expectation
from flashrec_harness.tracing.picture import show_file


@pytest.mark.slow
def test_the_bundled_checkpoint_is_traced(suite_context: SuiteContext) -> None:
    checks = {check.name: check for check in traces.run(suite_context)}
    for name in ("trace is whole", "spans", "waves and gaps"):
        assert checks[name].outcome is Outcome.PASS, checks[name].reason
    assert checks["waves and gaps"].data["waves"] >= 6
    if not hardware.has_gpu():
        assert checks["decode by graph replay"].outcome is Outcome.NOT_RUN
    picture = (suite_context.out_dir / "trace.html").read_text()
    assert "flashrec.prefill" in picture
    assert "http" not in picture


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"num_hidden_layers": 28}', None),
        ('{"num_hidden_layers": 28, "quantization_config": {"quant_method": "fp8"}}', 112),
    ],
)
def test_an_fp8_checkpoint_is_told_by_its_config(
    tmp_path: Path, config: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(config)
    told = {"engine": {"kernels": {"linear_fp8": "unused"}}}
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(200, json=told))
    assert traces.fp8_gemms(tmp_path, "http://server") == expected
    told["engine"]["kernels"]["linear_fp8"] = "triton"  # it quantised on load
    assert traces.fp8_gemms(tmp_path, "http://server") == 112
    monkeypatch.setattr(httpx, "get", lambda url, **_: httpx.Response(404))
    assert traces.fp8_gemms(tmp_path, "http://server") == expected


def test_a_file_is_shown_as_tables_and_a_picture(tmp_path: Path) -> None:
    path = write(tmp_path, TraceMaker().build())
    console = Console(record=True, width=160)
    assert show_file(path, None, console, Expectation(server=False)) == 0
    text = console.export_text()
    assert "decode by graph replay" in text
    assert "flashrec.decode" in text
    picture = (tmp_path / "t.html").read_text()
    assert "NVIDIA H200" in picture
    assert "GPU stream 7" in picture


def test_a_damaged_file_is_shown_as_invalid(tmp_path: Path) -> None:
    path = write(tmp_path, TraceMaker().build())
    path.write_bytes(path.read_bytes()[:-9])
    console = Console(record=True, width=160)
    assert show_file(path, None, console, Expectation(server=False)) == 4
    assert "cut short" in console.export_text()
