"""``flashrec doctor``: what this machine can run, and why not."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

from flashrec.console import make_console
from flashrec.kernels._triton import MODE
from flashrec.kernels.ops import select_ops
from flashrec.kernels.tiles import AttentionShape

PACKAGES = {
    "torch": "the engine",
    "transformers": "tokenizers and chat templates",
    "triton": "GPU kernels",
    "flashinfer-python": "prefill attention on a GPU, where it is chosen",
    "fastapi": "flashrec serve",
    "uvicorn": "flashrec serve",
    "pytest": "the harness",
}
EXTRAS = {"triton": "gpu", "flashinfer-python": "gpu", "fastapi": "serve", "uvicorn": "serve", "pytest": "harness"}
"""What to ask pip for where a package is missing; the others come with FlashRec."""


class Finding(NamedTuple):
    """One line of the report: what was looked at, what it is, and what follows."""

    subject: str
    state: str
    consequence: str


def findings() -> Iterator[Finding]:
    """Everything that decides what runs here."""
    yield Finding("python", platform.python_version(), platform.platform())
    for name, purpose in PACKAGES.items():
        try:
            yield Finding(name, importlib.metadata.version(name), purpose)
        except importlib.metadata.PackageNotFoundError:
            install = f"flashrec[{EXTRAS[name]}]" if name in EXTRAS else name
            yield Finding(name, "not installed", f"needed for {purpose}; pip install '{install}'")
    yield from _devices()
    yield from _kernels()


def _devices() -> Iterator[Finding]:
    yield Finding("cpu threads", str(torch.get_num_threads()), "the engine runs in float32 on plain PyTorch")
    if not torch.cuda.is_available():
        built = torch.version.cuda or "none: this torch is a CPU build"
        yield Finding("gpu", "none", f"torch sees no CUDA device (CUDA of its build: {built})")
        return
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        fp8 = "FP8 GEMMs run" if capability >= (8, 9) else "no FP8 GEMMs: they need capability 8.9"
        memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        yield Finding(f"gpu {index}", f"{name}, {capability[0]}.{capability[1]}", f"{memory}; {fp8}")


def _kernels() -> Iterator[Finding]:
    yield Finding("triton mode", MODE.value, "how Triton kernels run in this process")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    ops = select_ops(
        device,
        torch.bfloat16 if gpu else torch.float32,
        quantization="fp8" if gpu else "none",
        attention=AttentionShape(16, 8, 128, 64, torch.bfloat16),
    )
    for name, choice in ops.choices.items():
        yield Finding(f"kernel {name}", choice.implementation, choice.reason)


def doctor() -> None:
    """Say what this machine can run, which kernels would serve, and what is missing."""
    table = Table("what", "found", "so", title="flashrec doctor")
    for finding in findings():
        table.add_row(*map(escape, finding))
    make_console().print(table)
