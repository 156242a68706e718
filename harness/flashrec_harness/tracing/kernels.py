"""Classes of GPU kernels by name, and of CUDA calls that stall."""

from __future__ import annotations

import re
from enum import StrEnum


class KernelClass(StrEnum):
    """What a kernel does, as far as its name tells."""

    FP8_GEMM = "fp8 gemm"
    BF16_GEMM = "bf16 gemm"
    OTHER_GEMM = "other gemm"
    ATTENTION = "attention"
    EMBEDDING = "embedding"
    COPY = "copy"
    OTHER = "other"


_RULES: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    (KernelClass.COPY, re.compile(r"^(Memcpy|Memset)|memcpy|memset", re.IGNORECASE)),
    # Seen on an H200 with torch 2.11: row-wise `torch._scaled_mm` is `nvjet_sm90_qqtst_*` (q: 8-bit
    # operands), bf16 is `nvjet_sm90_tst_*`; CUTLASS shows `e4m3` only in its demangled name. The engine's own
    # products are `gemm_e4m3` and `gemm_plain`.
    (
        KernelClass.FP8_GEMM,
        re.compile(
            r"nvjet_\w*?_qq|^gemm_e4m3|fp8_scaled_mm|scaled_mm|e4m3.*(gemm|cutlass)|(gemm|cutlass).*e4m3|fp8\w*_?(gemm|linear)"
        ),
    ),
    (
        KernelClass.BF16_GEMM,
        re.compile(r"nvjet_\w*?_t[sn]t|^gemm_plain|bf16.*gemm|gemm.*bf16|s16816gemm|bf16\w*_?linear"),
    ),
    (KernelClass.OTHER_GEMM, re.compile(r"nvjet|gemm|splitKreduce|cutlass.*mm", re.IGNORECASE)),
    (
        KernelClass.ATTENTION,
        re.compile(r"attention|flash|fmha|cudnn.*sdpa|decode_context|merge_state", re.IGNORECASE),
    ),
    (KernelClass.EMBEDDING, re.compile(r"embedding|indexSelect|index_select", re.IGNORECASE)),
)


def classify(name: str) -> KernelClass:
    """The class of a kernel's (demangled) name; the first rule that matches."""
    return next((kind for kind, pattern in _RULES if pattern.search(name)), KernelClass.OTHER)


GEMMS = (KernelClass.FP8_GEMM, KernelClass.BF16_GEMM, KernelClass.OTHER_GEMM)

_STALL = re.compile(
    r"^(cudaMalloc|cudaFree|cudaMallocAsync|cudaFreeAsync|cudaHostAlloc|cudaFreeHost|cudaDeviceSynchronize"
    r"|cudaStreamSynchronize|cudaEventSynchronize|cudaMemcpy|cuMemAlloc\w*|cuMemFree\w*|cuStreamSynchronize"
    r"|cuCtxSynchronize)$"
)


def is_stall(call: str) -> bool:
    """Whether a CUDA call allocates, frees or waits for the device."""
    return bool(_STALL.match(call))


_LAUNCH = re.compile(r"^(cudaLaunchKernel\w*|cuLaunchKernel\w*|cudaLaunchCooperativeKernel\w*)$")
GRAPH_LAUNCH = "cudaGraphLaunch"


def is_eager_launch(call: str) -> bool:
    """Whether a CUDA call launches one kernel."""
    return bool(_LAUNCH.match(call))
