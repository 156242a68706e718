"""Decoding a wave: which buffers, program and captured graph it runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashrec.config import EngineConfig
from flashrec.runtime.buffers import Bucket, DecodeBuffers, WaveLayout, bucket_of, row_buckets
from flashrec.runtime.decode import CatalogProgram, Decoder
from flashrec.runtime.graph import CapturedProgram
from flashrec.runtime.ledger import Ledger, write_tags
from flashrec.runtime.loading import Loaded
from flashrec.runtime.member import Member, WaveKey
from flashrec.runtime.results import pack_frontier
from flashrec.search.expand import Sampling
from flashrec.search.filters import FilterBuffers, FilterSet
from flashrec.search.levels import build_levels


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A captured program: its row bucket, what its wave shares, and whether it applies filters."""

    rows: int
    wave: WaveKey
    filtered: bool


class DecodeStage:
    """Owns the static buffers of all buckets, the programs on them and their captured graphs."""

    def __init__(self, config: EngineConfig, parts: Loaded) -> None:
        self.config = config
        self.parts = parts
        self.decoder = Decoder(parts.model, parts.attention, parts.decode_ops, parts.pool.beam_base)
        self.buckets = row_buckets(config.rows_per_wave, config.max_requests)
        self.reset_counters()
        self._buffers: dict[tuple[int, int], DecodeBuffers] = {}
        self._programs: dict[WaveKey, CatalogProgram] = {}
        self._ledgers: dict[tuple[int, int], Ledger] = {}
        self._graphs: dict[GraphKey, CapturedProgram] = {}
        self._graph_memory: Any = None
        self._filters: FilterBuffers | None = None
        self._tags = torch.zeros(parts.pool.num_pages, dtype=torch.int64, device=parts.device)

    def reset_counters(self) -> None:
        """Start counting waves anew."""
        self.bucket_use: Counter[int] = Counter()
        self.graph_replays = 0
        self.eager_waves = 0

    @property
    def uses_graphs(self) -> bool:
        """Whether catalog waves at temperature 0 run from captured graphs."""
        return self.parts.device.type == "cuda" and not self.config.disable_cuda_graph

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def buffers(self, members: Sequence[Member]) -> DecodeBuffers:
        """The static buffers of the bucket that holds a wave."""
        rows = sum(member.width for member in members)
        return self.buffers_of(bucket_of(rows, len(members), self.buckets), members[0].key)

    def buffers_of(self, bucket: Bucket, key: WaveKey) -> DecodeBuffers:
        """The static buffers of a bucket for waves of this depth."""
        place = (bucket.rows, key.steps)
        if place not in self._buffers:
            self._buffers[place] = DecodeBuffers(
                bucket,
                pages=-(-self.parts.limits.max_context // self.config.page_tokens),
                passes=key.steps - 1,
                max_width=self.config.max_beam_width,
                tile_rows=self.parts.tile_rows,
                hidden=self.parts.model.config.hidden_size,
                dtype=self.config.compute_dtype,
                device=self.parts.device,
            )
        return self._buffers[place]

    def ledger(self, buffers: DecodeBuffers, key: WaveKey) -> Ledger | None:
        """Where a catalog wave on these buffers records its digests, if it does."""
        if not self.config.record_ledger or not key.constrained:
            return None
        place = (buffers.rows, key.steps)
        if place not in self._ledgers:
            self._ledgers[place] = Ledger(buffers, self._tags, key.steps)
        return self._ledgers[place]

    def run(self, members: Sequence[Member], key: WaveKey, buffers: DecodeBuffers, layout: WaveLayout) -> torch.Tensor:
        """Search a loaded, prefilled catalog wave; returns its packed frontier on the device."""
        self.bucket_use[buffers.rows] += 1
        if self.config.record_ledger:
            write_tags(self._tags, list(members), self.parts.pool)
        filters = self._filter_buffers().load([member.leaf_filter for member in members])
        if any(member.request.temperature > 0 for member in members):
            self.eager_waves += 1
            return self._eager(key, buffers, layout, filters, buffers.sampling(members))
        if not self.uses_graphs:
            self.eager_waves += 1
            return self._eager(key, buffers, layout, filters, None)
        self.graph_replays += 1
        return self._graph(key, buffers, filtered=filters is not None).replay()

    def warm_up(self, key: WaveKey) -> None:
        """Capture the program of every bucket, largest first so that they share memory, and one with filters.

        The other buckets' filtered programs, and those of other score spaces, are captured when first used.

        Raises:
            EngineFault: an operation cannot be captured.
        """
        if not self.uses_graphs:
            return
        for bucket in reversed(self.buckets):
            self._graph(key, self.buffers_of(bucket, key), filtered=False)
        self._graph(key, self.buffers_of(self.buckets[0], key), filtered=True)

    def program(self, key: WaveKey) -> CatalogProgram:
        """The search of waves that share ``key``."""
        found = self._programs.get(key)
        if found is None:
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
            found = self._programs[key] = CatalogProgram(self.decoder, levels)
        return found

    def _eager(
        self,
        key: WaveKey,
        buffers: DecodeBuffers,
        layout: WaveLayout,
        filters: FilterSet | None,
        sampling: Sampling | None,
    ) -> torch.Tensor:
        frontier = self.program(key).run(buffers, layout, filters, sampling, self.ledger(buffers, key))
        return pack_frontier(frontier)

    def _graph(self, key: WaveKey, buffers: DecodeBuffers, *, filtered: bool) -> CapturedProgram:
        place = GraphKey(buffers.rows, key, filtered)
        found = self._graphs.get(place)
        if found is None:
            # The host lists of a captured run are never read: spans, tiles and lengths are device data.
            layout = WaveLayout(widths=(), starts=(), pages=buffers.page_table.shape[1])
            filters = self._filter_buffers().filters if filtered else None
            if self._graph_memory is None:
                self._graph_memory = torch.cuda.graph_pool_handle()
            found = self._graphs[place] = CapturedProgram(
                lambda: self._eager(key, buffers, layout, filters, None),
                f"the {key.space.value} program of {buffers.rows} rows",
                self._graph_memory,
            )
        return found

    def _filter_buffers(self) -> FilterBuffers:
        if self._filters is None:
            assert self.parts.catalog is not None
            self._filters = FilterBuffers(
                self.config.max_filter_keys,
                self.config.max_requests,
                self.parts.catalog.num_sids,
                self.parts.device,
            )
        return self._filters
