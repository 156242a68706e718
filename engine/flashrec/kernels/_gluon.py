"""Gluon, Triton's lower layer, where this process compiles kernels; stand-ins that cannot be launched elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashrec.kernels._triton import MODE, TritonMode, tl

__all__ = ["after_previous", "gl", "gluon_jit", "hopper", "tile_descriptor"]

if TYPE_CHECKING or MODE is TritonMode.DEVICE:
    import triton.experimental.gluon.language as gl
    import triton.experimental.gluon.language.nvidia.hopper as hopper
    from triton.experimental import gluon
else:

    class _NoGluon:
        """Stands for Gluon's language; kernels that would use it are never launched."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    gl = hopper = _NoGluon()


def gluon_jit(
    function: Callable[..., Any], *, name: Callable[[Any], str] | None = None, varying: Sequence[str] = ()
) -> Any:
    """``gluon.jit`` where kernels are compiled; ``name`` and ``varying`` as in :func:`flashrec.kernels._triton.jit`.
    Elsewhere the function is returned as it is."""
    return gluon.jit(function, repr=name, do_not_specialize=varying) if MODE is TritonMode.DEVICE else function


@gluon_jit
def after_previous() -> None:
    """Device: :func:`flashrec.kernels._triton.after_previous`, on a Hopper."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


def tile_descriptor(tensor: torch.Tensor, rows: int, columns: int) -> Any:
    """A host-side descriptor of bf16 or FP8 ``tensor[rows, width]`` for the copy engine's tiles [rows, columns]."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [rows, columns]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}[tensor.dtype]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
