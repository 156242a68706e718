"""Named spans for traces, and the torch profiler with SGLang's start/stop semantics."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Protocol

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity

from flashrec.errors import FlashRecError, RequestError
from flashrec.torch_trace import Span, start_recording, write_trace

logger = logging.getLogger(__name__)

Stage = Literal["prefill", "decode"]
State = Literal["idle", "waiting", "recording", "flushing"]

_FILE_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_STAGE_NAMES: dict[Stage, str] = {"prefill": "EXTEND", "decode": "DECODE"}


class ProfilerStateError(FlashRecError):
    """The profiler cannot do this now, such as starting while it records; servers answer 409."""


@functools.cache
def _nvtx_available() -> bool:
    return torch.cuda.is_available()


class Watch(Protocol):
    """Who may want to see this process's spans."""

    @property
    def recording(self) -> bool:
        """Whether a span that begins now is wanted."""
        ...

    def show(self, span: Span) -> None:
        """A span that began when it was wanted has ended."""
        ...


class trace_range:  # noqa: N801 - used as a function: ``with trace_range("flashrec.prefill"):``
    """A span of the calling thread, shown in the Chrome trace and as an NVTX range.

    With no profiler running it costs 0.4 us on a CPU, where an idle ``record_function`` costs 6 us (torch
    2.13), and 1.6 us beside an H200, nearly all of it NVTX (torch 2.11; both 2026-11-29). The flag is
    torch's own, so a ``torch.profiler`` that somebody else started sees the spans too. Do not hold a span
    across an ``await``: ranges nest per thread.
    """

    __slots__ = ("_name", "_record", "_start")

    watch: ClassVar[Watch | None] = None
    """Who is shown spans as well, while another process records: see :meth:`Profiler.add`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._record: autograd_profiler.record_function | None = None
        self._start = 0

    def __enter__(self) -> None:
        watch = trace_range.watch
        if watch is not None and watch.recording:
            self._start = time.time_ns()
        if autograd_profiler._is_profiler_enabled:
            self._record = autograd_profiler.record_function(self._name)
            self._record.__enter__()
        if _nvtx_available():
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _nvtx_available():
            torch.cuda.nvtx.range_pop()
        if self._record is not None:
            self._record.__exit__(kind, error, trace)
            self._record = None
        watch = trace_range.watch
        if watch is not None and self._start:
            watch.show(Span(self._name, os.getpid(), threading.get_native_id(), self._start, time.time_ns()))


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What ``/start_profile`` asked for, in SGLang's names.

    ``num_steps`` counts forward passes, of which a prefill is one; recording ends with the wave in which
    the count is reached. ``start_step`` is the index of the first recorded forward pass since the process
    began, or the next one where that has passed. ``profile_by_stage`` writes one file up to the first
    decode step after the start (``EXTEND``) and one from there (``DECODE``), where ``num_steps`` counts.

    Raises:
        RequestError: a count below 1, an unsafe file name, an unknown activity.
    """

    output_dir: Path
    num_steps: int | None = None
    start_step: int | None = None
    activities: tuple[str, ...] = ("CPU", "GPU")
    with_stack: bool = True
    record_shapes: bool = True
    profile_by_stage: bool = False
    profile_prefix: str | None = None
    profile_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        for name in ("num_steps", "start_step"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(name, f"must be at least 1, got {value}")
        for name in ("profile_prefix", "profile_id"):
            value = getattr(self, name)
            if value is not None and not _FILE_SAFE.fullmatch(value):
                raise RequestError(name, f"must be letters, digits, '.', '_' or '-' (128 at most), got {value!r}")
        if not self.activities or not set(self.activities) <= {"CPU", "GPU"}:
            raise RequestError("activities", f"must be CPU, GPU or both, got {list(self.activities)}")

    def torch_activities(self) -> list[ProfilerActivity]:
        """The activities that this machine can record; a GPU is left out where there is none."""
        wanted = []
        if "CPU" in self.activities:
            wanted.append(ProfilerActivity.CPU)
        if "GPU" in self.activities and torch.cuda.is_available():
            wanted.append(ProfilerActivity.CUDA)
        if not wanted:
            raise RequestError("activities", "GPU alone was asked for and this machine has none; add CPU")
        return wanted

    def file_name(self, stage: Stage | None) -> str:
        """``<prefix or id>-TP-0[-<stage>].trace.json.gz``; the id joins a prefix that is already taken."""
        suffix = f"-TP-0-{_STAGE_NAMES[stage]}.trace.json.gz" if stage else "-TP-0.trace.json.gz"
        name = f"{self.profile_prefix or self.profile_id}{suffix}"
        if self.profile_prefix and (self.output_dir / name).exists():
            return f"{self.profile_prefix}-{self.profile_id}{suffix}"
        return name


class Profiler:
    """Records the process on behalf of the engine thread.

    :meth:`start`, :meth:`stop`, :meth:`on_forward` and :meth:`on_wave_end` are called on the engine
    thread only; :meth:`status`, :attr:`state` and :meth:`wait` from any thread. All threads are recorded,
    so that the spans of the tokeniser and of the responder stand beside the engine's.
    """

    def __init__(self) -> None:
        self.forward_passes = 0
        self._options: ProfileOptions | None = None
        self._stage: Stage | None = None
        self._first_pass: int | None = None
        self._recording: torch.profiler.profile | None = None
        self._flushes: list[threading.Thread] = []
        self._files: list[Path] = []
        self._error: str | None = None
        self._added: list[Span] = []
        self._adding = threading.Lock()
        self._since_ns = 0
        self.collect: Callable[[], None] = lambda: None
        """Called before a capture is written, off the engine thread: whoever holds spans for it adds them."""

    @property
    def state(self) -> State:
        """``waiting`` for ``start_step``, ``recording``, ``flushing`` to disk, or ``idle``."""
        if self._options is not None:
            return "waiting" if self._recording is None else "recording"
        return "flushing" if any(thread.is_alive() for thread in self._flushes) else "idle"

    def status(self) -> dict[str, object]:
        """State, forward passes so far, and the files (with any error) of the latest capture."""
        return {
            "state": self.state,
            "forward_passes": self.forward_passes,
            "files": [str(path) for path in self._files],
            "error": self._error,
        }

    def start(self, options: ProfileOptions) -> None:
        """Begin a capture, now or at ``options.start_step``.

        Raises:
            ProfilerStateError: one is running or still being written, or torch cannot record.
            RequestError: the machine has none of the activities, or the directory cannot be made.
        """
        if self.state != "idle":
            raise ProfilerStateError(f"the profiler is {self.state}: wait for it, or POST /stop_profile first")
        options.torch_activities()
        try:
            options.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError("output_dir", f"cannot be created: {error.strerror}") from None
        self._options, self._files, self._error = options, [], None
        self._first_pass, self._added, self._since_ns = None, [], 0
        if options.start_step is None or options.start_step <= self.forward_passes + 1:
            self._begin("prefill" if options.profile_by_stage else None)

    def add(self, span: Span) -> None:
        """Show what another process did, in the capture that ran then; from any thread."""
        if self.state != "idle":
            with self._adding:
                self._added.append(span)

    def stop(self) -> None:
        """End the capture and write its file in the background. Nothing running: nothing to do."""
        if self._recording is not None:
            self._end()
        self._options = None

    def on_forward(self, stage: Stage, passes: int = 1) -> None:
        """Told just before a prefill, or before ``passes`` decode steps (several in one captured graph)."""
        with contextlib.suppress(ProfilerStateError):  # in the status and the log; a wave never fails for it
            self._follow(stage, passes)
        self.forward_passes += passes

    def on_wave_end(self) -> None:
        """Told after each wave: the only place where ``num_steps`` ends a capture."""
        if self._options is None or self._options.num_steps is None or self._first_pass is None:
            return
        if self.forward_passes - self._first_pass >= self._options.num_steps:
            self.stop()

    def wait(self, timeout: float) -> bool:
        """Wait until no file is being written; False after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        for thread in list(self._flushes):
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._flushes)

    def _follow(self, stage: Stage, passes: int) -> None:
        options = self._options
        if options is None:
            return
        if self._recording is None:
            if self.forward_passes + passes >= (options.start_step or 0):
                self._begin(stage if options.profile_by_stage else None)
        elif self._stage == "prefill" and stage == "decode":
            self._end()
            if self._options is not None:
                self._first_pass = None
                self._begin(stage)

    def _begin(self, stage: Stage | None) -> None:
        assert self._options is not None
        self._stage = stage
        if self._first_pass is None:
            self._first_pass = self.forward_passes
        try:
            self._recording = start_recording(
                self._options.torch_activities(),
                with_stack=self._options.with_stack,
                record_shapes=self._options.record_shapes,
            )
        except RuntimeError as error:
            self._give_up(error)
            raise ProfilerStateError(f"torch cannot record: {error}") from error

    def _end(self) -> None:
        assert self._recording is not None
        assert self._options is not None
        recording, self._recording = self._recording, None
        window = range(self._since_ns, time.time_ns() + 1)
        self._since_ns = window.stop
        try:
            recording.stop()
        except (RuntimeError, UnicodeDecodeError) as error:
            self._give_up(error)
            return
        path = self._options.output_dir / self._options.file_name(self._stage)
        self._files.append(path)
        self._flushes = [thread for thread in self._flushes if thread.is_alive()]
        # Not a daemon: a process that ends meanwhile waits for its trace instead of truncating it.
        thread = threading.Thread(target=self._flush, args=(recording, path, window), name="flashrec-trace-flush")
        self._flushes.append(thread)
        thread.start()

    def _flush(self, recording: torch.profiler.profile, path: Path, window: range) -> None:
        self.collect()
        with self._adding:  # what began before or after belongs to another capture, whose file may be written first
            spans = [span for span in self._added if span.start_ns in window]
        try:
            write_trace(recording, path, spans)
        except (OSError, RuntimeError, ValueError) as error:
            self._error = f"{path.name}: {error}"
            logger.error("trace not written: %s", self._error)

    def _give_up(self, error: Exception) -> None:
        self._recording = self._options = None
        self._error = f"{type(error).__name__}: {error}"
        logger.error("trace abandoned: %s", self._error)
