"""The engine: a loaded checkpoint, its pool and caches, and the wave that runs on them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flashrec.config import EngineConfig
from flashrec.errors import NonFiniteError, RequestError
from flashrec.models.config import ModelConfig
from flashrec.profiler import Profiler, trace_range
from flashrec.request import Request, Result
from flashrec.runtime.admission import Admission
from flashrec.runtime.buffers import DecodeBuffers, WaveLayout, bucket_of, row_buckets
from flashrec.runtime.decode import CatalogProgram, Decoder
from flashrec.runtime.free import FreeProgram
from flashrec.runtime.ledger import Ledger, StepDigest, write_tags
from flashrec.runtime.loading import Loaded, load_engine_parts
from flashrec.runtime.member import Member, WaveKey, validate
from flashrec.runtime.prefill import Prefill
from flashrec.runtime.results import (
    catalog_results,
    free_results,
    pack_frontier,
    unpack_frontier,
)
from flashrec.search.filters import filter_set
from flashrec.search.levels import build_levels
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout

Prompt = Request | str | Sequence[int]
Outcome = Result | NonFiniteError


@dataclass(slots=True)
class Counters:
    """What the engine has done since it started."""

    waves: int = 0
    requests: int = 0
    rows: int = 0
    padded_rows: int = 0
    decode_passes: int = 0
    graph_replays: int = 0


class Engine:
    """Serves one checkpoint from one device.

    One thread runs waves; :meth:`prepare` may be called from any.

    Raises:
        FlashRecError: the checkpoint, the catalog or the configuration cannot be served.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.parts: Loaded = load_engine_parts(config)
        self.profiler = Profiler()
        self.counters = Counters()
        self.buckets = row_buckets(config.rows_per_wave)
        self.bucket_use: Counter[int] = Counter()
        self.admission = Admission(self.parts.cache, self.buckets, max_requests=config.max_requests)
        self.ledgers: dict[str, tuple[StepDigest, ...]] = {}
        self._buffers: dict[tuple[int, int], DecodeBuffers] = {}
        self._programs: dict[WaveKey, CatalogProgram] = {}
        self._ledger_buffers: dict[tuple[int, int], Ledger] = {}
        self._tags = torch.zeros(self.parts.pool.num_pages, dtype=torch.int64, device=self.parts.device)
        self._rids = itertools.count()
        parts = self.parts
        self._decoder = Decoder(parts.model, parts.attention, parts.decode_ops, parts.pool.beam_base)
        self._prefill = Prefill(
            parts.model,
            parts.attention,
            parts.ops,
            page_size=config.page_size,
            tile_rows=parts.tile_rows,
            max_tokens=config.max_prefill_tokens,
            profiler=self.profiler,
        )

    @property
    def layout(self) -> SidLayout | None:
        return self.parts.layout

    @property
    def catalog(self) -> Catalog | None:
        return self.parts.catalog

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self.parts.model.config

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt's text. Raises :class:`RequestError` without a tokenizer."""
        if self.tokenizer is None:
            raise RequestError("text", "the checkpoint has no tokenizer; send input_ids")
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prepare(self, request: Request) -> Member:
        """Validate a request. Raises :class:`RequestError` naming the field that is wrong."""
        member = validate(request, self.parts.limits, self.layout, self.catalog)
        self.admission.check_fits(member)
        return member

    def generate(self, prompts: Sequence[Prompt], **fields: Any) -> list[Result]:
        """Search from every prompt, in as few waves as the budgets allow; results keep the prompts' order.

        A prompt is text, token ids, or a :class:`Request`; ``fields`` are those of a request and apply to the
        prompts that are not one. Raises :class:`RequestError` for an invalid prompt, before any runs, and
        ``NonFiniteError`` when the model's scores are not finite.
        """
        members = [self.prepare(self._request(prompt, fields)) for prompt in prompts]
        results: dict[Member, Result] = {}
        waiting = list(members)
        while waiting:
            wave = self.admission.admit(waiting)
            for member, outcome in zip(wave, self.run_wave(wave), strict=True):
                if isinstance(outcome, NonFiniteError):
                    raise outcome
                results[member] = outcome
            waiting = [member for member in waiting if member not in results]
        return [results[member] for member in members]

    def run_wave(self, members: list[Member]) -> list[Outcome]:
        """Prefill and decode admitted members; their pages go back or stay cached whatever happens."""
        done = False
        try:
            outcomes = self._run(members)
            done = True
        finally:
            self.admission.finish(members, keep=done)
            self.profiler.on_wave_end()
        return outcomes

    def flush_cache(self) -> int:
        """Forget every cached prefix; returns the number of pages freed."""
        return self.parts.cache.flush()

    def stats(self) -> dict[str, Any]:
        """Counters, cache and pool state, buckets used and the kernels that run."""
        cache, pool = self.parts.cache, self.parts.pool
        return {
            **asdict(self.counters),
            **asdict(cache.stats),
            "cached_pages": cache.cached_pages,
            "free_pages": pool.free_pages,
            "usable_pages": pool.usable_pages,
            "buckets": dict(sorted(self.bucket_use.items())),
            "kernels": self.parts.ops.chosen,
            "attention": self.parts.attention.name,
        }

    def _request(self, prompt: Prompt, fields: dict[str, Any]) -> Request:
        if isinstance(prompt, Request):
            return prompt if prompt.rid else replace(prompt, rid=self._rid())
        ids = self.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)
        return Request(input_ids=ids, **{"rid": self._rid(), **fields})

    def _rid(self) -> str:
        return f"local-{next(self._rids)}"

    @torch.inference_mode()
    def _run(self, members: list[Member]) -> list[Outcome]:
        key = members[0].key
        buffers = self._bucket(sum(member.width for member in members), key)
        layout = buffers.load(members)
        ledger = self._ledger(buffers, key, members)
        with trace_range("flashrec.prefill"):
            cached = [member.cached for member in members]
            table = buffers.page_table[:, : layout.pages]
            self._prefill.run(members, table, cached, buffers.head_input)
        self.profiler.on_forward("decode", key.steps - 1)
        self._count(members, buffers, key)
        if not key.constrained:
            with trace_range("flashrec.decode"):
                banks = FreeProgram(self._decoder).run(buffers, layout, members)
            with trace_range("flashrec.finalize"):
                return free_results(members, banks)
        with trace_range("flashrec.decode"):
            packed = self._decode_catalog(members, key, buffers, layout, ledger)
        with trace_range("flashrec.finalize"):
            assert self.catalog is not None
            assert self.layout is not None
            rows = unpack_frontier(packed.cpu())
            if ledger is not None:
                for member, record in zip(members, ledger.read(len(members), key.steps), strict=True):
                    self.ledgers[member.request.rid] = record
            return catalog_results(members, layout, rows, self.catalog, self.layout)

    def _decode_catalog(
        self,
        members: list[Member],
        key: WaveKey,
        buffers: DecodeBuffers,
        layout: WaveLayout,
        ledger: Ledger | None,
    ) -> torch.Tensor:
        assert self.catalog is not None
        filters = filter_set([member.leaf_filter for member in members], self.catalog.num_sids, self.parts.device)
        sampled = any(member.request.temperature > 0 for member in members)
        sampling = buffers.sampling() if sampled else None
        return pack_frontier(self._program(key).run(buffers, layout, filters, sampling, ledger))

    def _bucket(self, rows: int, key: WaveKey) -> DecodeBuffers:
        size, passes = bucket_of(rows, self.buckets), key.steps - 1
        buffers = self._buffers.get((size, passes))
        if buffers is None:
            buffers = self._buffers[size, passes] = DecodeBuffers(
                rows=size,
                requests=min(size, self.config.max_requests),
                pages=-(-self.parts.limits.max_context // self.config.page_size),
                passes=passes,
                tile_rows=self.parts.tile_rows,
                hidden=self.model_config.hidden_size,
                dtype=self.config.compute_dtype,
                device=self.parts.device,
            )
        return buffers

    def _program(self, key: WaveKey) -> CatalogProgram:
        program = self._programs.get(key)
        if program is None:
            parts = self.parts
            assert parts.layout is not None
            assert parts.trie is not None
            levels = build_levels(
                parts.layout,
                parts.trie,
                parts.model.lm_head(),
                key.space,
                score_end=self.config.score_end,
                dense_cells=self.config.dense_trie_cells,
            )
            program = self._programs[key] = CatalogProgram(self._decoder, levels)
        return program

    def _ledger(self, buffers: DecodeBuffers, key: WaveKey, members: list[Member]) -> Ledger | None:
        if not self.config.record_ledger or not key.constrained:
            return None
        write_tags(self._tags, members, self.parts.pool)
        place = (buffers.rows, key.steps)
        if place not in self._ledger_buffers:
            self._ledger_buffers[place] = Ledger(buffers, self._tags, key.steps)
        return self._ledger_buffers[place]

    def _count(self, members: list[Member], buffers: DecodeBuffers, key: WaveKey) -> None:
        rows = sum(member.width for member in members)
        self.counters.waves += 1
        self.counters.requests += len(members)
        self.counters.rows += rows
        self.counters.padded_rows += buffers.rows - rows
        self.counters.decode_passes += key.steps - 1
        self.bucket_use[buffers.rows] += 1
