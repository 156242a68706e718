"""The engine's configuration: every flag, documented once, validated before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flashrec.errors import ConfigError
from flashrec.request import ScoreSpace


class EngineConfig(BaseModel):
    """Frozen, validated settings of one :class:`~flashrec.runtime.engine.Engine`.

    Raises:
        ConfigError: a value is out of range or contradicts another; the message names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: Path = Field(description="Hugging Face directory with config.json, *.safetensors and a tokenizer")
    sid_vocab_file: Path | None = Field(None, description="catalog of semantic IDs; without one the search is free")
    sid: str | None = Field(None, description="override of the inferred layout: START:END/SIZE,SIZE,...")
    sid_packed: str | None = Field(
        None, description="the catalogs' keys are packed integers: BASE,DEPTH; OpenOneRec's 8192,3 needs no flag"
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute type; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    quantization: Literal["auto", "none", "fp8"] = Field(
        "auto", description="auto follows the checkpoint; fp8 quantises a bf16 checkpoint on load"
    )
    kv_cache_dtype: Literal["auto", "float32", "bf16", "fp8_e4m3"] = Field(
        "auto", description="type of cached keys and values; auto follows dtype"
    )
    attention_backend: Literal["auto", "torch", "triton", "flashinfer"] = Field(
        "auto", description="auto is torch on a CPU and the measured best on a GPU"
    )
    score_space: ScoreSpace = Field(ScoreSpace.SID, description="what the softmax of a step is normalised over")
    score_end: bool = Field(False, description="score an implied end token instead of giving it log-probability 0")
    max_beam_width: int = Field(1024, ge=1, description="widest beam a request may ask for")
    max_rows: int | None = Field(
        None, ge=1, description="beams decoded together in a wave; default 2,048 on a CPU, 8,192 on a GPU"
    )
    max_requests: int = Field(64, ge=1, le=1024, description="requests in a wave")
    max_context: int | None = Field(
        None, ge=2, description="longest prompt in tokens; default what the model and the pool allow"
    )
    max_decode_steps: int = Field(8, ge=1, le=64, description="longest search without a catalog, in tokens")
    max_prefill_tokens: int | None = Field(
        None,
        ge=16,
        description="prompt tokens per forward pass, more are chunked; default 32,768 on a GPU, 8,192 on a CPU",
    )
    page_size: int | None = Field(
        None, ge=1, le=256, description="tokens per page of the KV pool; default 64 on a GPU and 16 on a CPU"
    )
    kv_pool_tokens: int | None = Field(None, ge=16, description="size of the context KV pool; default from memory")
    memory_fraction: float = Field(
        0.85, gt=0, lt=1, description="share of free GPU memory for weights, KV and workspaces"
    )
    kv_pool_bytes: int = Field(1 << 30, ge=1 << 16, description="budget of the context KV pool on a CPU")
    disable_radix_cache: bool = Field(False, description="do not keep prompt prefixes between waves")
    disable_cuda_graph: bool = Field(False, description="launch decode steps one by one (for debugging)")
    capture_filters: bool = Field(
        False,
        description="capture the graphs of waves with exclude and allow lists at start too, not at their first use",
    )
    enable_fused_rms_fp8: bool = Field(True, description="fuse RMSNorm with the FP8 quantisation of its output")
    enable_fused_silu_fp8: bool = Field(True, description="fuse SiLU x up with the FP8 quantisation of its output")
    enable_fused_qk_rope_kv: bool = Field(True, description="fuse QK-norm, RoPE and the KV store")
    cpu_threads: int = Field(1, ge=1, description="threads of a CPU engine; a row's bits may depend on it")
    max_filter_keys: int = Field(
        1 << 20, ge=1, description="SIDs that the exclude and allow lists of a wave may name together"
    )
    queue_size: int = Field(1024, ge=1, description="requests that wait for a wave; more are refused")
    max_head_delay_ms: int = Field(
        200, ge=0, description="how much later a request may arrive and still overtake; 0 is strictly in order"
    )
    dense_trie_cells: int = Field(
        1 << 20, ge=0, description="trie levels with at most this many cells are dense, the others CSR"
    )
    max_catalogs: int = Field(4, ge=1, description="catalogs served at once, each under a name of its own")
    catalog_bytes: int = Field(
        1 << 30, ge=1, description="device memory for the tries of all catalogs, earlier revisions included"
    )
    record_ledger: bool = Field(False, description="record a digest of every step's inputs on the device")
    invariance_check: bool = Field(True, description="prove at start that a request's bits do not depend on its wave")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "config"
            got = f" (got {first.get('input')!r})" if first["loc"] else ""  # of the whole, that is every setting
            raise ConfigError(f"{where}: {first['msg']}{got}") from None

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is None:
            raise ValueError(f"device {self.device!r} is none of auto, cpu, cuda and cuda:N")
        if self.max_rows is not None and self.max_rows < self.max_beam_width:
            raise ValueError(
                f"max_rows {self.max_rows} is below max_beam_width {self.max_beam_width}: no wave could hold that beam"
            )
        if self.quantization == "fp8" and self.dtype == "float32" and self.torch_device.type == "cuda":
            raise ValueError("quantization fp8 on a GPU needs dtype bfloat16")
        return self

    @property
    def torch_device(self) -> torch.device:
        """The device that ``device`` names on this machine."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of activations and of weights that are not quantised."""
        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device.type == "cuda" else torch.float32
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def page_tokens(self) -> int:
        """Tokens per page. A whole tile of keys in one page is what the GPU kernels read fastest."""
        return self.page_size or (64 if self.torch_device.type == "cuda" else 16)

    @property
    def prefill_chunk(self) -> int:
        """Most prompt tokens of a forward pass."""
        return self.max_prefill_tokens or (32768 if self.torch_device.type == "cuda" else 8192)

    @property
    def rows_per_wave(self) -> int:
        """The row budget of a wave."""
        if self.max_rows is not None:
            return self.max_rows
        return max(self.max_beam_width, 8192 if self.torch_device.type == "cuda" else 2048)
