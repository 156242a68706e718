"""Faults of what surrounds the forward pass: identity caches, buffers, the answers' way back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.request import Request
from flashrec.runtime import decode
from flashrec.runtime.buffers import DecodeBuffers
from flashrec.runtime.decode import CatalogProgram, Decoder
from flashrec.runtime.engine import Engine
from flashrec.runtime.member import Member, WaveKey
from flashrec.runtime.member import validate as validate_request
from flashrec.runtime.scheduler import Scheduler
from flashrec.runtime.stage import DecodeStage
from flashrec.runtime.ticket import Ticket
from flashrec_harness.faults.registry import fault, soak


@fault("id-keyed-cache", axis="mixed", tensor="seq_lens")
def id_keyed_cache() -> Iterator[None]:
    """Prepared prompts are remembered by id(request): an address that is used again brings back another prompt."""
    known: dict[int, NDArray[np.int32]] = {}

    def validate(request: Request, *arguments: Any) -> Member:
        member = validate_request(request, *arguments)
        member.tokens = known.setdefault(id(request), member.tokens)
        return member

    with mock.patch("flashrec.runtime.engine.validate", validate):
        yield


@fault("stale-context-length", axis="mixed", tensor="seq_lens")
def stale_context_length() -> Iterator[None]:
    """A bucket's context lengths are written for its first wave only; later waves find those of the first."""
    real = DecodeBuffers.load
    first: dict[int, torch.Tensor] = {}

    def load(self: DecodeBuffers, members: Sequence[Member]) -> Any:
        layout = real(self, members)
        self.context_len.copy_(first.setdefault(id(self), self.context_len.clone()))
        return layout

    with mock.patch.object(DecodeBuffers, "load", load):
        yield


@fault("parents-off-by-one", axis="buckets", tensor="kv")
def parents_off_by_one() -> Iterator[None]:
    """In the bucket of 48 rows a beam takes the ancestors of the row before its parent."""
    real = decode.reorder_ancestors

    def reorder(buffers: DecodeBuffers, parent: torch.Tensor, stored: int) -> None:
        real(buffers, (parent - 1).clamp(min=0) if buffers.rows == 48 else parent, stored)

    with mock.patch.object(decode, "reorder_ancestors", reorder):
        yield


@fault("decode-position-by-bucket", axis="buckets", tensor="positions")
def decode_position_by_bucket() -> Iterator[None]:
    """In the bucket of 32 rows decode passes rotate with the next position."""
    real = Decoder.forward

    def forward(self: Decoder, buffers: DecodeBuffers, *arguments: Any) -> torch.Tensor:
        if buffers.rows != 32:
            return real(self, buffers, *arguments)
        buffers.context_len.add_(1)
        with mock.patch.object(self.attention, "decode", _shorter(self.attention.decode)):
            hidden = real(self, buffers, *arguments)
        buffers.context_len.sub_(1)
        return hidden

    with mock.patch.object(Decoder, "forward", forward):
        yield


def _shorter(plan: Any) -> Any:
    """Attention plans as if the context were one token shorter than it says."""

    def shorter(meta: Any) -> Any:
        return plan(replace(meta, context_len=meta.context_len - 1))

    return shorter


@fault("wrong-page-tag", axis="ledger", tensor="kv")
def wrong_page_tag() -> Iterator[None]:
    """The ledger names a page by its physical number: the same content has other names in other runs."""

    def write(tags: torch.Tensor, members: Sequence[Member], _: Any) -> None:
        for member in members:
            pages = torch.tensor(member.pages, device=tags.device)
            tags[pages] = pages

    with mock.patch("flashrec.runtime.stage.write_tags", write):
        yield


@fault("last-catalog-for-all", axis="catalogs", tensor="parents")
def last_catalog_for_all() -> Iterator[None]:
    """Programs are kept by score space alone: a wave runs over the catalog that was loaded last."""
    real = DecodeStage.program

    def program(self: DecodeStage, key: WaveKey) -> CatalogProgram:
        real(self, key)
        alike = [one for one in self._programs if (one.space, one.steps) == (key.space, key.steps)]
        return self._programs[max(alike, key=lambda one: one.revision)]

    with mock.patch.object(DecodeStage, "program", program):
        yield


@fault("answers-swapped", soak("answers equal those given alone"), axis="arrival")
def answers_swapped() -> Iterator[None]:
    """The scheduler hands the answers of a wave of several requests to its tickets in reverse order."""
    real = Engine.outcomes

    def landing(self: Engine, flight: Any) -> list[Any]:
        outcomes = real(self, flight)
        scheduled = threading.current_thread().name == "flashrec-engine"
        return outcomes[::-1] if scheduled else outcomes

    with mock.patch.object(Engine, "outcomes", landing):
        yield


@fault("page-leak-on-cancel", soak("nothing is held when nothing runs"), axis="cancelled")
def page_leak_on_cancel() -> Iterator[None]:
    """A request that is cancelled while its wave runs keeps its last page for ever."""
    real = Scheduler._land

    def land(self: Scheduler, wave: list[Ticket], flight: Any) -> None:
        for ticket in wave:
            if ticket.future.cancelled() and ticket.member.own:
                ticket.member.own.pop()
        real(self, wave, flight)

    with mock.patch.object(Scheduler, "_land", land):
        yield
