"""Next-token logits in float64 from a ``transformers`` model, remembered per prompt and prefix."""

from __future__ import annotations

import copy
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from flashrec.kernels.quantize import quant_per_token
from flashrec_harness.references.dequantized import plain_checkpoint
from flashrec_harness.references.types import Tokens

_MEMORY_BYTES = 512 * 2**20
_ROWS_PER_FORWARD = 256


class LogitSource(Protocol):
    """Logits of the next token."""

    vocab_size: int

    def next_logits(self, prompt: Tokens, prefixes: Sequence[Tokens]) -> NDArray[np.float64]:
        """float64 ``[len(prefixes), vocab_size]`` after ``prompt + prefix``; all prefixes have one length."""
        ...


def load_transformers_model(model_path: Path, dtype: torch.dtype) -> Any:
    """The checkpoint's ``transformers`` model in ``dtype``, in eval mode, from local files only.

    Of an FP8 checkpoint it has the quantised weights, dequantised, and activations that are not quantised.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with plain_checkpoint(model_path) as path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model.eval()


@contextmanager
def fp8_activations(model: Any) -> Iterator[None]:
    """While it lasts every projection of ``model`` sees its input through FP8: e4m3 codes, one scale a token.

    The head's input stays as it is: the engine's head is not FP8 either.
    """

    def through_fp8(_module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *rest = arguments
        codes, scale = quant_per_token(x.reshape(-1, x.shape[-1]))
        return (codes.to(scale.dtype) * scale).to(x.dtype).reshape(x.shape), *rest

    projections = [module for name, module in model.named_modules() if name.endswith("_proj")]
    hooks = [module.register_forward_pre_hook(through_fp8) for module in projections]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def float64_shortage(model_path: Path) -> str:
    """Why a float64 copy of the checkpoint is too much for this machine; empty if it is not."""
    needed = 8 * parameter_count(model_path) + _MEMORY_BYTES
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed <= physical // 2:
        return ""
    gib = 2**30
    return f"a float64 copy needs {needed / gib:.1f} GiB, more than half of this machine's {physical / gib:.1f} GiB"


def parameter_count(model_path: Path) -> int:
    """Parameters of a checkpoint, from the headers of its safetensors files."""
    count = 0
    for path in model_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


_STEP = 2.0**-36
"""Logits are multiples of it, 1.5e-11: a float32 model's errors are a hundred thousand times that."""


class Float64Logits:
    """A ``transformers`` model whose products, norms and softmax run in float64.

    ``transformers`` computes RMS norms in float32 whatever the model's dtype; they are replaced. Rotary
    angles stay as it computes them, in float32: they are part of the checkpoint's definition.
    """

    def __init__(self, model_path: Path) -> None:
        self._model = load_transformers_model(model_path, torch.float64)
        for module in self._model.modules():
            if hasattr(module, "variance_epsilon"):
                module.forward = MethodType(_rms_norm_float64, module)
        self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        self._known: OrderedDict[Tokens, dict[Tokens, NDArray[np.float64]]] = OrderedDict()
        self._prompt: tuple[Tokens, Any] | None = None
        self._fp8 = False

    def with_fp8_activations(self) -> Float64Logits:
        """The same model, in float64 but for what enters its projections, which is rounded as an FP8 engine does."""
        other = copy.copy(self)
        other._known, other._prompt, other._fp8 = OrderedDict(), None, True
        return other

    def next_logits(self, prompt: Tokens, prefixes: Sequence[Tokens]) -> NDArray[np.float64]:
        known = self._known.setdefault(prompt, {})
        self._known.move_to_end(prompt)
        missing = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in known]
        for start in range(0, len(missing), _ROWS_PER_FORWARD):
            rows = missing[start : start + _ROWS_PER_FORWARD]
            known.update(zip(rows, self._forward(prompt, rows), strict=True))
        self._forget_old()
        return np.stack([known[prefix] for prefix in prefixes])

    @torch.no_grad()
    def _forward(self, prompt: Tokens, prefixes: list[Tokens]) -> NDArray[np.float64]:
        if not prefixes[0]:
            self._prompt = (prompt, _new_cache())
            return self._run([prompt], self._prompt[1])
        if self._prompt is None or self._prompt[0] != prompt:
            self._forward(prompt, [()])
        assert self._prompt is not None
        cache = copy.deepcopy(self._prompt[1])
        cache.batch_repeat_interleave(len(prefixes))
        return self._run(prefixes, cache)

    def _run(self, token_ids: Sequence[Tokens], cache: Any) -> NDArray[np.float64]:
        # The cache goes by position: its keyword changed its name within transformers 5.
        with fp8_activations(self._model) if self._fp8 else nullcontext():
            output = self._model(torch.tensor(token_ids), None, None, cache, use_cache=True, logits_to_keep=1)
        # A float64 product's last bits depend on where a row stands in a batch (AMD EPYC, torch 2.13): equal
        # rows would rank by noise where the order asked for has them tied. Nothing judged here is as fine as a step.
        rows: NDArray[np.float64] = np.round(output.logits[:, -1].numpy() / _STEP) * _STEP
        return rows

    def _forget_old(self) -> None:
        row_bytes = 8 * self.vocab_size
        while len(self._known) > 1 and sum(map(len, self._known.values())) * row_bytes > _MEMORY_BYTES:
            self._known.popitem(last=False)


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _rms_norm_float64(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    normed: torch.Tensor = self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return normed
