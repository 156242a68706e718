"""A launched wave on its way back from the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashrec.errors import NonFiniteError
from flashrec.request import Result
from flashrec.runtime.buffers import WaveLayout
from flashrec.runtime.ledger import Ledger, StepDigest
from flashrec.runtime.member import Member
from flashrec.runtime.results import catalog_results, free_results, unpack_frontier
from flashrec.search.free import Bank

Outcome = Result | NonFiniteError
Mark = torch.cuda.Event | None
"""A place in the device's queue; ``None`` on a CPU, where nothing is queued."""


@dataclass(slots=True, eq=False)
class Flight:
    """A launched wave: what it takes to answer it once the device is ``done`` with it, ``prefilled`` some time before.

    ``packed`` int32 [3, rows] is the frontier of a catalog wave on its way to the host; ``banks`` are the
    finished hypotheses of a wave without one.
    """

    members: list[Member]
    layout: WaveLayout
    packed: torch.Tensor | None
    banks: list[Bank]
    ledger: Ledger | None
    done: Mark
    prefilled: Mark

    def await_decode(self) -> None:
        """Wait until the device has read the prompts: soon enough to queue another wave behind this one."""
        if self.prefilled is not None:
            self.prefilled.synchronize()

    def outcomes(self) -> list[Outcome]:
        """Wait for the device and read what it found, in the members' order."""
        if self.done is not None:
            self.done.synchronize()
        if self.packed is None:
            return free_results(self.members, self.banks)
        served = self.members[0].served
        assert served is not None
        return catalog_results(self.members, self.layout, unpack_frontier(self.packed), served.catalog, served.layout)

    def digests(self) -> dict[str, tuple[StepDigest, ...]]:
        """The ledger's records by request id, of a wave that is done; none where no ledger is kept."""
        if self.ledger is None:
            return {}
        rids = [member.request.rid for member in self.members]
        return dict(zip(rids, self.ledger.read(len(rids)), strict=True))


def mark(device: torch.device) -> Mark:
    """A mark after everything queued so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
