"""Lets an unmodified SGLang import and serve a dense model on a plain x86 CPU.

What such a machine lacks: a GPU, a build of ``sgl_kernel``, a Triton that SGLang can use, and a torchvision
that matches a CPU torch. Import this before ``sglang`` in every process; the server's children are spawned
and spawn runs the launcher file again, so its import at the top of the launcher covers them.

Nothing is faked: a kernel that is missing raises when it is called.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch


def define_torchvision_ops() -> torch.library.Library:
    """Two operator schemas that torchvision's Python side decorates and its CUDA library fails to bring."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def stub_triton() -> None:
    """SGLang ships a Triton stand-in for one platform; install its parts on this one too."""
    if importlib.util.find_spec("triton") is not None:
        return
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise ImportError("sglang is not installed in this environment")
    path = os.path.join(package.submodule_search_locations[0], "_platform_stubs.py")
    spec = importlib.util.spec_from_file_location("_sgl_platform_stubs", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: not an importable module")
    stubs: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    sys.meta_path.insert(0, stubs._TritonFinder())
    mock = stubs._make_mock

    triton = mock("triton")
    triton.__version__ = "3.0.0"
    triton.cdiv, triton.next_power_of_2, triton.Config = stubs._cdiv, stubs._next_power_of_2, stubs._Config
    language = triton.language = mock("triton.language")
    language.constexpr = type("constexpr", (), {"__init__": _hold_value})
    language.extra = mock("triton.language.extra")
    language.extra.libdevice = mock("triton.language.extra.libdevice")
    runtime = triton.runtime = mock("triton.runtime")
    runtime.jit = mock("triton.runtime.jit")
    runtime.jit.JITFunction = type("JITFunction", (), {})
    runtime.jit.KernelInterface = type("KernelInterface", (stubs._StubBase,), {})
    runtime.cache = mock("triton.runtime.cache")
    runtime.cache.triton_key = stubs._triton_key
    runtime.autotuner = mock("triton.runtime.autotuner")
    runtime.autotuner.OutOfResources = type("OutOfResources", (Exception,), {})
    runtime.autotuner.PTXASError = type("PTXASError", (Exception,), {})
    runtime.driver = mock("triton.runtime.driver")
    compiler = triton.compiler = mock("triton.compiler")
    compiler.CompiledKernel = type("CompiledKernel", (stubs._StubBase,), {})
    compiler.compiler = mock("triton.compiler.compiler")
    compiler.compiler.ASTSource = type("ASTSource", (stubs._StubBase,), {})
    compiler.compiler.triton_key = stubs._triton_key
    triton.testing = mock("triton.testing")
    triton.tools = mock("triton.tools")
    triton.tools.tensor_descriptor = mock("triton.tools.tensor_descriptor")
    triton.backends = mock("triton.backends")
    triton.backends.compiler = mock("triton.backends.compiler")
    triton.backends.compiler.GPUTarget = type("GPUTarget", (stubs._StubBase,), {})


def _hold_value(self: Any, value: object = None) -> None:
    self.value = value


class MissingKernels(types.ModuleType):
    """Stands for ``sgl_kernel``: every name resolves at import, and raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name} has no CPU build here")

        return missing


def stub_sgl_kernel() -> None:
    if importlib.util.find_spec("sgl_kernel") is not None:
        return
    module = MissingKernels("sgl_kernel")
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__path__ = []
    module.__version__ = "0.0.0+cpu"  # type: ignore[attr-defined]
    sys.modules["sgl_kernel"] = module


_KEPT_ALIVE = define_torchvision_ops()
stub_triton()
stub_sgl_kernel()
