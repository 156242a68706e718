"""Decoding a wave: which buffers, program and captured graph it runs on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashrec.config import EngineConfig
from flashrec.request import ScoreSpace
from flashrec.runtime.buffers import Bucket, DecodeBuffers, WaveLayout, bucket_of, row_buckets
from flashrec.runtime.decode import CatalogProgram, Decoder
from flashrec.runtime.free import FreeProgram
from flashrec.runtime.graph import CapturedProgram, capture_cost
from flashrec.runtime.ledger import Ledger, SlotPositions, write_tags
from flashrec.runtime.loading import Loaded
from flashrec.runtime.member import Member, WaveKey
from flashrec.runtime.results import pack_frontier
from flashrec.search.expand import Sampling
from flashrec.search.filters import FilterBuffers, FilterSet
from flashrec.search.free import Bank
from flashrec.search.levels import HeadLevel, build_levels, head_levels


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
        self.positions = SlotPositions(parts.pool) if config.record_ledger else None
        self.decoder = Decoder(parts.model, parts.attention, parts.ops, parts.pool.beam_base, self.positions)
        self.buckets = row_buckets(config.rows_per_wave, config.max_requests)
        self.reset_counters()
        self._buffers: dict[tuple[int, int], DecodeBuffers] = {}
        self._programs: dict[WaveKey, CatalogProgram] = {}
        self._heads: dict[ScoreSpace, list[HeadLevel]] = {}
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

    def stats(self) -> dict[str, Any]:
        """Waves by the rows of their bucket and by how they ran, and what the process's captures took."""
        return {
            "buckets": dict(sorted(dict(self.bucket_use).items())),
            "graphs": self.captured,
            "graph_replays": self.graph_replays,
            "eager_waves": self.eager_waves,
            **capture_cost(),
        }

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
                kv_heads=self.parts.pool.num_kv_heads,
                context=self.parts.limits.max_context,
                hidden=self.parts.model.config.hidden_size,
                dtype=self.config.compute_dtype,
                device=self.parts.device,
            )
        return self._buffers[place]

    def ledger(self, buffers: DecodeBuffers, key: WaveKey) -> Ledger | None:
        """Where a wave on these buffers records its digests, if it does."""
        if self.positions is None:
            return None
        place = (buffers.rows, key.steps)
        if place not in self._ledgers:
            self._ledgers[place] = Ledger(buffers, self._tags, self.positions, key.steps)
        return self._ledgers[place]

    def run(self, members: Sequence[Member], key: WaveKey, buffers: DecodeBuffers, layout: WaveLayout) -> torch.Tensor:
        """Search a loaded, prefilled catalog wave; returns its packed frontier on the device."""
        self.bucket_use[buffers.rows] += 1
        if self.config.record_ledger:
            write_tags(self._tags, list(members), self.parts.pool)
        filters = self._filter_buffers().load([member.leaf_filter for member in members])
        if key.sampled:
            self.eager_waves += 1
            return self._eager(key, buffers, layout, filters, buffers.sampling(members))
        if not self.uses_graphs:
            self.eager_waves += 1
            return self._eager(key, buffers, layout, filters, None)
        self.graph_replays += 1
        return self._graph(key, buffers, filtered=filters is not None).replay()

    def run_free(
        self, members: Sequence[Member], buffers: DecodeBuffers, layout: WaveLayout, ledger: Ledger | None
    ) -> list[Bank]:
        """Search a loaded, prefilled wave without a catalog; returns each request's finished hypotheses."""
        self.eager_waves += 1
        if ledger is not None:
            write_tags(self._tags, list(members), self.parts.pool)
        return FreeProgram(self.decoder).run(buffers, layout, members, ledger)

    def missing(self, key: WaveKey, *, like: int | None = None) -> list[GraphKey]:
        """The programs to :meth:`capture` before waves of ``key`` come: of every bucket, and one with filters, or all
        with ``capture_filters``.

        Further ones, of other score spaces for instance, are captured when first used; those that waves of the
        catalog revision ``like`` have used are wanted too. Largest first, so that they share memory.
        """
        if not self.uses_graphs:
            return []
        wanted = {GraphKey(bucket.rows, key, False) for bucket in self.buckets}
        filtered = self.buckets if self.config.capture_filters else self.buckets[:1]
        wanted |= {GraphKey(bucket.rows, key, True) for bucket in filtered}
        for place in self._graphs:
            if place.wave.revision == like:
                wanted.add(replace(place, wave=place.wave._replace(revision=key.revision)))
        return sorted(wanted - self._graphs.keys(), key=lambda place: (-place.rows, repr(place)))

    @torch.inference_mode()
    def capture(self, place: GraphKey) -> None:
        """Capture a program ahead of its first wave.

        Raises:
            CaptureError: an operation of it cannot be captured.
        """
        bucket = next(bucket for bucket in self.buckets if bucket.rows == place.rows)
        self._graph(place.wave, self.buffers_of(bucket, place.wave), filtered=place.filtered)

    def forget(self, revisions: Collection[int]) -> None:
        """Give up the programs and graphs of catalog revisions that no wave will ask for."""
        if not revisions:
            return
        self._programs = {key: kept for key, kept in self._programs.items() if key.revision not in revisions}
        self._graphs = {key: kept for key, kept in self._graphs.items() if key.wave.revision not in revisions}

    def program(self, key: WaveKey) -> CatalogProgram:
        """The search of waves that share ``key``."""
        found = self._programs.get(key)
        if found is None:
            served = self.parts.catalogs.living(key.revision)
            if key.space not in self._heads:
                head = self.parts.model.lm_head()
                self._heads[key.space] = head_levels(served.layout, head, key.space, score_end=self.config.score_end)
            levels = build_levels(self._heads[key.space], served.tries)
            found = self._programs[key] = CatalogProgram(self.decoder, levels)
        return found

    def passes(self, key: WaveKey) -> int:
        """Decode passes of waves that share ``key``."""
        return self.program(key).passes if key.constrained else key.steps - 1

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
            self._filters = FilterBuffers(self.config.max_filter_keys, self.config.max_requests, self.parts.device)
        return self._filters
