"""The trace suite: take a trace of a serving engine through ``/start_profile`` and judge what it shows."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from flashrec.kernels.ops import UNUSED
from flashrec_harness.dialects import Generate
from flashrec_harness.material import Prompt, load_material
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.overload.fleet import Fleet
from flashrec_harness.planting import planted_names
from flashrec_harness.servers import flashrec_server
from flashrec_harness.targets import display_path
from flashrec_harness.tracing.checks import SUITE, Expectation, judge_file
from flashrec_harness.tracing.picture import write_picture
from flashrec_harness.tracing.reader import TraceError, wait_until_complete

FLUSH_TIMEOUT_S = 180.0
_ROUNDS, _BUSY_ROUNDS = 6, 24
"""Requests of each client at least."""
_WARM_UP_ROUNDS = 2
_FUSED_PROJECTIONS = 4
"""FP8 GEMMs of a layer (SPEC M4): QKV, attention output, gate/up, down."""


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """What goes through the server meanwhile: ``concurrency`` clients, in ``processes``, that ask for ``beam`` beams
    each, of histories or, with ``context``, of so many random tokens. ``busy`` is the least share of the time that the
    device must work.
    """

    concurrency: int = 4
    beam: int = 8
    context: int | None = None
    busy: float | None = None
    processes: int = 1

    @property
    def requests(self) -> int:
        """How many they send: more where filling up and running dry would count."""
        return (_ROUNDS if self.busy is None else _BUSY_ROUNDS) * self.concurrency


def client_processes(concurrency: int) -> int:
    """Processes for so many clients: one for all 32 let the device rest 44 % of the time (H200, 2026-12-01)."""
    return max(1, min(concurrency // 4, len(os.sched_getaffinity(0)) // 2))


def run(context: SuiteContext, load: TraceLoad | None = None) -> list[Check]:
    """Start a server (or use ``context.url``), record a short closed loop, judge the trace.

    The trace and its picture stay in ``context.out_dir``.
    """
    load = load or TraceLoad()
    requests = max(24 if context.quick else 64, load.requests)
    material = load_material(context)
    if load.context is None:
        prompts = material.history_prompts(requests)
    else:
        # None comes twice: a prompt from the prefix cache is hardly any work.
        count = requests + _WARM_UP_ROUNDS * load.concurrency
        prompts = material.random_prompts(count, load.context, context.seed)
    with _server(context) as url:
        gemms = fp8_gemms(context.model_path, url)
        try:
            trace = record(url, prompts, context.out_dir / "profiles", num_requests=requests, load=load)
        except (TraceError, httpx.HTTPError) as error:
            return [Check(SUITE, "trace is whole", Outcome.INVALID, "no trace was taken", reason=str(error))]
    if not trace.is_file():
        reason = f"the server wrote {trace} on its own machine; copy it here and run `trace FILE`"
        return [Check(SUITE, "trace is whole", Outcome.NOT_RUN, "nothing was read", reason=reason)]
    checks = judge_file(trace, Expectation(fp8_gemms_per_forward=gemms, busy=load.busy))
    if checks[0].outcome is Outcome.PASS:
        checks[0].data["picture"] = write_picture(trace, context.out_dir / "trace.html").name
    flags = "" if gemms is None else f" --fp8-gemms {gemms}"
    flags += "" if load.busy is None else f" --busy {load.busy:g}"
    for check in checks[1:]:
        check.repeat = f"python -m flashrec_harness trace {display_path(trace)}{flags}"
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


def record(
    url: str, prompts: list[Prompt], directory: Path, *, num_requests: int, load: TraceLoad | None = None
) -> Path:
    """Profile a server while ``num_requests`` requests go through it; the path of the complete trace.

    The server is warmed up first, so that the trace shows its steady state. Where it is asked how busy the device is,
    no Python frames are recorded, which slow the host down most. Raises
    :class:`~flashrec_harness.tracing.reader.TraceError` if no complete file appears, and
    :class:`httpx.HTTPError` if the server refuses.
    """
    load = load or TraceLoad()
    bodies = [orjson.dumps(Generate().body(ids, load.beam, None)) for ids in prompts]
    fleet = Fleet(url, bodies, load.processes)
    try:
        fleet.load(_WARM_UP_ROUNDS * load.concurrency, load.concurrency)
        with httpx.Client(base_url=url, timeout=FLUSH_TIMEOUT_S, trust_env=False) as client:
            options = {"profile_prefix": "harness", "with_stack": load.busy is None, "record_shapes": False}
            client.post("/start_profile", json=options).raise_for_status()
            found = fleet.load(num_requests, load.concurrency)
            stopped = client.post("/stop_profile")
            stopped.raise_for_status()
    finally:
        fleet.close()
    refused = Counter(shot.status for shot in found.shots if shot.status != httpx.codes.OK)
    if refused:
        statuses = ", ".join(f"{status} ({times}x)" for status, times in refused.items())
        raise TraceError(f"{refused.total()} of {len(found.shots)} requests failed: HTTP {statuses}")
    if found.lost:
        raise TraceError(f"{len(found.lost)} of {num_requests} requests got no answer: {found.lost[0]}")
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


def fp8_gemms(model_path: Path, url: str) -> int | None:
    """FP8 GEMMs per forward pass of a quantised checkpoint, or of one that the server says it quantised on load;
    ``None`` for another. Raises :class:`httpx.HTTPError` where the server does not answer."""
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    if not config.get("quantization_config") and not _quantises(url):
        return None
    return _FUSED_PROJECTIONS * int(config["num_hidden_layers"])


def _quantises(url: str) -> bool:
    answer = httpx.get(f"{url}/server_info", timeout=FLUSH_TIMEOUT_S, trust_env=False)
    info: dict[str, Any] = answer.json() if answer.status_code == httpx.codes.OK else {}
    return bool(info.get("engine", {}).get("kernels", {}).get("linear_fp8", UNUSED) != UNUSED)
