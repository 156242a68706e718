"""Remembers whether a torch profiler ever ran in this process; torch only says whether one runs now."""

from __future__ import annotations

_seen: list[bool] = []


def watch() -> None:
    """Start remembering, before anything is measured. Every torch profiler starts through this hook."""
    from torch.autograd import profiler as autograd_profiler

    start = autograd_profiler._run_on_profiler_start

    def remembering() -> None:
        _seen.append(True)
        start()

    autograd_profiler._run_on_profiler_start = remembering


def ever() -> bool:
    """Whether a profiler runs now, or ran since :func:`watch`."""
    from torch.autograd import profiler as autograd_profiler

    return bool(_seen) or bool(autograd_profiler._is_profiler_enabled)
