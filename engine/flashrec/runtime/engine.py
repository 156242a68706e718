"""The engine: a loaded checkpoint, its pool and caches, and the waves that run on them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from flashrec.config import EngineConfig
from flashrec.errors import EngineFault, NonFiniteError, RequestError
from flashrec.kvcache.radix import CacheStats
from flashrec.models.config import ModelConfig
from flashrec.profiler import Profiler, trace_range
from flashrec.request import Request, Result
from flashrec.runtime.admission import Admission
from flashrec.runtime.buffers import DecodeBuffers, WaveLayout
from flashrec.runtime.catalogs import Catalogs, Place
from flashrec.runtime.counters import Counters
from flashrec.runtime.flight import Flight, Mark, Outcome, mark
from flashrec.runtime.invariance import prove_invariance
from flashrec.runtime.ledger import StepDigest
from flashrec.runtime.loading import Loaded, load_engine_parts
from flashrec.runtime.member import Member, WaveKey, validate
from flashrec.runtime.prefill import Prefill
from flashrec.runtime.prefill_graph import PrefillGraphs
from flashrec.runtime.reload import Reload, Turn, at_once
from flashrec.runtime.stage import DecodeStage
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout
from flashrec.transfer import stock_pinned_memory

LEDGERS_KEPT = 1024
"""The newest requests whose ledgers an engine keeps."""

PINNED_BLOCK = 1 << 20
"""Bytes: more than what a pass or a wave uploads at once; three int32 for each of 32,768 tokens are 393 KB."""

Prompt = Request | str | Sequence[int]


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
        self.stage = DecodeStage(config, self.parts)
        self._reload = Reload(self.parts.catalogs, self.stage, config.score_space)
        self.admission = Admission(
            self.parts.cache,
            self.stage.buckets,
            max_filter_keys=config.max_filter_keys,
            max_head_delay=config.max_head_delay_ms / 1e3,
        )
        self.ledgers: dict[str, tuple[StepDigest, ...]] = {}
        self._rids = itertools.count()
        self._prefill = Prefill(
            self.parts.model,
            self.parts.attention,
            self.parts.ops,
            page_size=config.page_tokens,
            max_tokens=config.prefill_chunk,
            profiler=self.profiler,
            graphs=PrefillGraphs(config, self.parts) if self.stage.uses_graphs else None,
            positions=self.stage.positions,
        )
        if self.parts.device.type == "cuda":
            stock_pinned_memory(PINNED_BLOCK)
        self._warm_up()

    @property
    def layout(self) -> SidLayout | None:
        return self.parts.layout

    @property
    def catalog(self) -> Catalog | None:
        """The catalog of requests that name none, as it is now."""
        served = self.catalogs.find(None)
        return None if served is None else served.catalog

    @property
    def catalogs(self) -> Catalogs:
        return self.parts.catalogs

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
        member = validate(request, self.parts.limits, self.catalogs.find(request.catalog))
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
        waiting, flights = list(members), deque[Flight]()
        try:
            while waiting or flights:
                wave = self.admission.admit(waiting) if waiting and len(flights) < self.waves_in_flight else []
                if wave:
                    flights.append(self.launch(wave))
                    launched = set(wave)
                    waiting = [member for member in waiting if member not in launched]
                elif flights:
                    results |= self._landed(flights.popleft())
                else:
                    raise EngineFault("no wave can be formed although none is in flight: pages have leaked")
        finally:
            for flight in flights:
                self.finish(flight)
        return [results[member] for member in members]

    @property
    def waves_in_flight(self) -> int:
        """Waves that may be launched before the first is finished: on a GPU a second one hides its host work.

        A ledger is read from static buffers that the next wave overwrites, so it allows one.
        """
        return 2 if self.parts.device.type == "cuda" and not self.config.record_ledger else 1

    def _landed(self, flight: Flight) -> dict[Member, Result]:
        landed: dict[Member, Result] = {}
        for member, outcome in zip(flight.members, self.finish(flight), strict=True):
            if isinstance(outcome, NonFiniteError):
                raise outcome
            landed[member] = outcome
        return landed

    def run_wave(self, members: list[Member]) -> list[Outcome]:
        """Launch an admitted wave and wait for its outcomes, in the members' order."""
        return self.finish(self.launch(members))

    @torch.inference_mode()
    def launch(self, members: list[Member]) -> Flight:
        """Queue an admitted wave's prefill and decode on the device, without waiting for it.

        Waves run in the order of their launches. If this raises, the members' pages have been given back.
        """
        key = members[0].key
        buffers = self.stage.buffers(members)
        try:
            with trace_range("flashrec.prefill"):
                self._prefill.run(members, buffers.head_input)
            prefilled = mark(self.parts.device)
            self._reload.tidy()  # from here on while the device works on the prompts
            layout = buffers.load(members)
            passes = self.stage.passes(key)
            self.profiler.on_forward("decode", passes)
            self.counters.count(members, buffers, passes)
            with trace_range("flashrec.decode"):
                flight = self._decode(members, key, buffers, layout, prefilled)
        except BaseException:
            self.admission.finish(members)
            self.profiler.on_wave_end()
            raise
        self.admission.keep(members)  # while the device works on the wave: 0.6 ms for 40,000 tokens
        return flight

    def finish(self, flight: Flight) -> list[Outcome]:
        """:meth:`outcomes` and :meth:`release`."""
        try:
            return self.outcomes(flight)
        finally:
            self.release(flight)

    def outcomes(self, flight: Flight) -> list[Outcome]:
        """Wait for a launched wave. What it holds is held until :meth:`release`."""
        try:
            with trace_range("flashrec.finalize"):
                outcomes = flight.outcomes()
                self._keep(flight.digests())
        finally:
            self.profiler.on_wave_end()
        return outcomes

    def release(self, flight: Flight) -> None:
        """A wave is done: its prompts stay cached and its other pages go back."""
        self.admission.finish(flight.members)

    def load_catalog(self, name: str, path: Path | str, *, activate: bool = True, turn: Turn = at_once) -> Place:
        """Serve a catalog under ``name``, in place of the one there, which then stands by; or let it stand by.

        Requests that were prepared before are answered from the revision of then. ``turn`` runs what may not run
        beside a wave, for callers that are not the thread of the waves. A failure leaves everything as it was.

        Raises:
            CatalogError: the file is malformed, or does not fit the layout or the device.
            CatalogStateError: another catalog is being loaded, or the engine was started without one.
            RequestError: the name is malformed, or one too many.
        """
        return self._reload.load(name, Path(path), activate=activate, turn=turn)

    def rollback_catalog(self, name: str, *, turn: Turn = at_once) -> Place:
        """Exchange a name's catalog and the one that stands by. Raises :class:`CatalogStateError` if none does."""
        return self._reload.rollback(name, turn=turn)

    def drop_catalog(self, name: str, *, turn: Turn = at_once) -> None:
        """Serve a name no more. Raises :class:`RequestError` if it is not served, or the default."""
        self._reload.drop(name, turn=turn)

    def flush_cache(self) -> int:
        """Forget every cached prefix; returns the number of pages freed."""
        return self.parts.cache.flush()

    def close(self) -> None:
        """Release the checkpoint, the pool and the captured graphs; the engine cannot be used afterwards."""
        device = self.parts.device
        del self.stage, self.admission, self._reload, self._prefill, self.parts
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def stats(self) -> dict[str, Any]:
        """Counters, cache and pool state, buckets used, and the device, compute type and kernels that run."""
        cache, pool = self.parts.cache, self.parts.pool
        return {
            **asdict(self.counters),
            **asdict(cache.stats),
            "cached_pages": cache.cached_pages,
            "free_pages": pool.free_pages,
            "usable_pages": pool.usable_pages,
            **self.stage.stats(),
            "dtype": str(self.config.compute_dtype).removeprefix("torch."),
            **self.parts.described(),
        }

    def _request(self, prompt: Prompt, fields: dict[str, Any]) -> Request:
        if isinstance(prompt, Request):
            return prompt if prompt.rid else replace(prompt, rid=self._rid())
        ids = self.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)
        return Request(input_ids=ids, **{"rid": self._rid(), **fields})

    def _rid(self) -> str:
        return f"local-{next(self._rids)}"

    def _decode(
        self, members: list[Member], key: WaveKey, buffers: DecodeBuffers, layout: WaveLayout, prefilled: Mark
    ) -> Flight:
        ledger = self.stage.ledger(buffers, key)
        if not key.constrained:
            banks = self.stage.run_free(members, buffers, layout, ledger)
            return Flight(members, layout, None, banks, ledger, mark(self.parts.device), prefilled)
        packed = self.stage.run(members, key, buffers, layout)
        if packed.device.type == "cuda":
            packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
        return Flight(members, layout, packed, [], ledger, mark(self.parts.device), prefilled)

    def _keep(self, digests: dict[str, tuple[StepDigest, ...]]) -> None:
        self.ledgers |= digests
        while len(self.ledgers) > LEDGERS_KEPT:
            del self.ledgers[next(iter(self.ledgers))]

    def _warm_up(self) -> None:
        """Compile and capture what the default program needs, so that no request waits (SPEC P1), and prove R1."""
        if self.parts.device.type == "cuda":  # nowhere else is anything compiled
            self._prefill.warm_up(min(self.config.max_requests, self.config.prefill_chunk))
        if (served := self.catalogs.find(None)) is not None:
            self._reload.capture(served)
        if self.config.invariance_check:
            prove_invariance(self)
            self._forget_warm_up()

    def _forget_warm_up(self) -> None:
        self.counters = Counters()
        self.parts.cache.stats = CacheStats()
        self.stage.reset_counters()
        self.profiler.forward_passes = 0
        self.ledgers.clear()
