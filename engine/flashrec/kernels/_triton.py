"""How Triton is present in this process: on a GPU, in its interpreter (no GPU), or not at all.

Every kernel file takes ``tl`` and ``jit`` from here, so that the package imports on a machine without Triton
and its kernels can be stepped through on one without a GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["MODE", "TritonMode", "ceil_div", "descriptor", "jit", "next_power_of_2", "tl"]

_SWITCH = "TRITON_INTERPRET"


class TritonMode(StrEnum):
    """What a Triton kernel of this process runs on."""

    DEVICE = "device"
    INTERPRETER = "interpreter"
    ABSENT = "absent"


def _interpreter_wanted() -> bool:
    asked = os.environ.get(_SWITCH)
    return not torch.cuda.is_available() if asked is None else asked == "1"


def _import_gluon() -> None:
    """Imports Gluon, which Triton's argument handling needs, and leaves the environment as it was.

    Triton 3.6 imports it on the first launch, and it insists that the switch agrees with the mode of Triton's
    own functions.
    """
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        importlib.import_module("triton.experimental.gluon")
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _interpret_standard_functions() -> None:
    """Makes ``tl.sum`` and its like interpreted, whatever Triton was told when it was first imported.

    Another library may have imported it before (transformers does). Without a GPU nothing else can run them.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    language = importlib.import_module("triton.language")
    for owner in (language, language.standard, language.tensor):
        for name, function in list(vars(owner).items()):
            if isinstance(function, JITFunction):
                setattr(owner, name, InterpretedFunction(function.fn))


def _accept_scalar_bounds() -> None:
    """Lets loop bounds be kernel scalars under NumPy 2.4 and later.

    Triton 3.6's interpreter holds a scalar as an array of one element and calls ``int`` on it, which NumPy
    has refused since 2.4.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index


_PIECE_BYTES = 128


def _multiply_widely() -> None:
    """Lets a row of a product have the same bits wherever it stands in its tile, and however wide its tile is.

    The interpreter leaves products to NumPy's BLAS, whose kernels add up the rows at a tile's edge in another order
    (OpenBLAS 0.3.31 on a Zen 3, 2026-12-01; on a Xeon they do not). In float64 that is lost in the rounding to float32.
    The matrix unit adds to the total every 32 bytes of K, so that a tile's width does not show: here every 128 bytes,
    the least that a 16-bit or 8-bit tile has. And bfloat16 is multiplied as such, not as the integers that hold it.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    create_dot = interpreter.InterpreterBuilder.create_dot

    def wide(handle: Any, piece: Any = ...) -> Any:
        data = handle.data[piece]
        if handle.dtype == tl.bfloat16:
            data = (data.astype("uint32") << 16).view("float32")
        if data.dtype.kind != "f":
            return interpreter.TensorHandle(data, handle.dtype)
        return interpreter.TensorHandle(data.astype("float64"), tl.float64)

    def create_wide_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        total, size = d, a.data.shape[-1]
        step = min(size, _PIECE_BYTES * 8 // a.dtype.primitive_bitwidth)
        for begin in range(0, size, step):
            k = slice(begin, begin + step)
            product = create_dot(self, wide(a, (..., k)), wide(b, (..., k, slice(None))), wide(total), *options)
            total = interpreter.TensorHandle(product.data.astype(d.data.dtype), d.dtype.scalar)
        return total

    interpreter.InterpreterBuilder.create_dot = create_wide_dot


def _detect() -> TritonMode:
    if importlib.util.find_spec("triton") is None:
        return TritonMode.ABSENT
    if not _interpreter_wanted():
        return TritonMode.DEVICE
    _interpret_standard_functions()
    _import_gluon()
    _accept_scalar_bounds()
    _multiply_widely()
    return TritonMode.INTERPRETER


MODE = _detect()

if TYPE_CHECKING or MODE is not TritonMode.ABSENT:
    import triton
    import triton.language as tl
else:

    class _NoTriton:
        """Stands for ``triton.language`` in annotations; kernels that would use it are never launched."""

        constexpr = int

    tl = _NoTriton()


def jit(function: Callable[..., Any], *, name: Callable[[Any], str] | None = None, varying: Sequence[str] = ()) -> Any:
    """``triton.jit`` for this process's mode. Without Triton the function is returned as it is.

    ``name`` gives a compiled variant the name that a trace shows, from its ``constants`` and ``signature``. ``varying``
    are the parameters that follow from what is asked for: without it Triton compiles anew for an integer that is 1 or
    a multiple of 16 and for a pointer to 16 bytes, in the middle of serving.
    """
    if MODE is TritonMode.ABSENT:
        return function
    if MODE is TritonMode.INTERPRETER:
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction(function)
    return triton.jit(function, repr=name, do_not_specialize=varying)


@functools.cache
def since_hopper() -> bool:
    """Whether kernels are compiled for a Hopper or newer, which has a copy engine for tiles."""
    if MODE is not TritonMode.DEVICE:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def overlap() -> dict[str, bool]:
    """Launch arguments of a kernel that calls :func:`after_previous`: on a Hopper or newer it may be launched
    while the kernel before it ends (programmatic dependent launch), which hides most of the gap between the two."""
    return {"OVERLAP": True, "launch_pdl": True} if since_hopper() else {"OVERLAP": False}


@jit
def after_previous(OVERLAP: tl.constexpr) -> None:
    """Device: waits until the kernel before has ended and its writes are seen; the next one may then be launched.

    Every kernel of :func:`overlap` calls it once, and before that writes nothing and reads nothing that the kernel
    before writes, which may still run. All kernels before that one have ended: it lets the next begin only after its
    own wait. Hence the order of the two lines.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
    """A host-side tensor descriptor of ``tensor`` for tiles of shape ``block``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, block)


def ceil_div(a: int, b: int) -> int:
    """The least integer that is at least ``a / b``."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n`` (``n >= 1``)."""
    return 1 << (n - 1).bit_length()
