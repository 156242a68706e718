"""The trace suite: take a trace of a serving engine through ``/start_profile`` and judge what it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from flashrec_harness.load import HttpTarget, closed_loop
from flashrec_harness.material import Prompt, load_material
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.planting import planted_names
from flashrec_harness.servers import flashrec_server
from flashrec_harness.targets import display_path
from flashrec_harness.tracing.checks import SUITE, Expectation, judge_file
from flashrec_harness.tracing.picture import write_picture
from flashrec_harness.tracing.reader import TraceError, wait_until_complete

FLUSH_TIMEOUT_S = 180.0
_CONCURRENCY = 4
_WIDTH = 8
_FUSED_PROJECTIONS = 4
"""FP8 GEMMs of a layer (SPEC M4): QKV, attention output, gate/up, down."""


def run(context: SuiteContext) -> list[Check]:
    """Start a server (or use ``context.url``), record a short closed loop, judge the trace.

    The trace and its picture stay in ``context.out_dir``.
    """
    requests = 24 if context.quick else 64
    prompts = load_material(context).history_prompts(requests)
    with _server(context) as url:
        try:
            trace = record(url, prompts, context.out_dir / "profiles", num_requests=requests)
        except (TraceError, httpx.HTTPError) as error:
            return [Check(SUITE, "trace is whole", Outcome.INVALID, "no trace was taken", reason=str(error))]
    if not trace.is_file():
        reason = f"the server wrote {trace} on its own machine; copy it here and run `trace FILE`"
        return [Check(SUITE, "trace is whole", Outcome.NOT_RUN, "nothing was read", reason=reason)]
    checks = judge_file(trace, Expectation(fp8_gemms_per_forward=fp8_gemms(context.model_path)))
    if checks[0].outcome is Outcome.PASS:
        checks[0].data["picture"] = write_picture(trace, context.out_dir / "trace.html").name
    for check in checks[1:]:
        check.repeat = f"python -m flashrec_harness trace {display_path(trace)}"
    return checks


@contextmanager
def _server(context: SuiteContext) -> Iterator[str]:
    """The server that the context names, or our own, which profiles into the suite's directory."""
    if context.url is not None:
        yield context.url
        return
    with flashrec_server(
        context.model_path,
        sid_vocab_file=context.sid_vocab_file,
        arguments=(
            *(("--sid", context.sid) if context.sid else ()),
            # The engine's own proof would refuse some of the faults before this suite sees them.
            *(("--no-invariance-check",) if planted_names() else ()),
        ),
        env={"FLASHREC_TORCH_PROFILER_DIR": str((context.out_dir / "profiles").resolve())},
        log_dir=context.out_dir,
    ) as server:
        yield server.url


def record(url: str, prompts: list[Prompt], directory: Path, *, num_requests: int) -> Path:
    """Profile a server while ``num_requests`` requests go through it; the path of the complete trace.

    The server is warmed up first, so that the trace shows its steady state. Raises
    :class:`~flashrec_harness.tracing.reader.TraceError` if no complete file appears, and
    :class:`httpx.HTTPError` if the server refuses.
    """
    target = HttpTarget(url, prompts, n=_WIDTH, max_new_tokens=None, concurrency=_CONCURRENCY)
    try:
        closed_loop(target, 2 * _CONCURRENCY, _CONCURRENCY)
        with httpx.Client(base_url=url, timeout=FLUSH_TIMEOUT_S, trust_env=False) as client:
            options = {"profile_prefix": "harness", "with_stack": True, "record_shapes": False}
            client.post("/start_profile", json=options).raise_for_status()
            result = closed_loop(target, num_requests, _CONCURRENCY)
            stopped = client.post("/stop_profile")
            stopped.raise_for_status()
    finally:
        target.close()
    if result.failures:
        raise TraceError(f"{len(result.failures)} of {num_requests} requests failed: {result.failures[0].error}")
    path = _trace_path(stopped, directory)
    if path.parent.is_dir():
        wait_until_complete(path, timeout_s=FLUSH_TIMEOUT_S)
    return path


def _trace_path(stopped: httpx.Response, directory: Path) -> Path:
    """Where the server says its trace goes; another server's answer is text, its newest file then counts."""
    try:
        files = stopped.json()["files"]
    except (json.JSONDecodeError, KeyError, TypeError):
        files = sorted(directory.glob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise TraceError("the server named no trace file after /stop_profile")
    return Path(files[-1])


def fp8_gemms(model_path: Path) -> int | None:
    """FP8 GEMMs per forward pass of a quantised checkpoint, ``None`` for one whose config asks for none."""
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    if not config.get("quantization_config"):
        return None
    return _FUSED_PROJECTIONS * int(config["num_hidden_layers"])
