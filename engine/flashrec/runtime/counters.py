"""What an engine has done since it started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashrec.runtime.buffers import DecodeBuffers
from flashrec.runtime.member import Member


@dataclass(slots=True)
class Counters:
    """Waves, their requests and rows, the rows that fill up their buckets, and decode passes."""

    waves: int = 0
    requests: int = 0
    rows: int = 0
    padded_rows: int = 0
    decode_passes: int = 0

    def count(self, members: Sequence[Member], buffers: DecodeBuffers, passes: int) -> None:
        """A wave starts on these buffers and decodes in so many ``passes``."""
        rows = sum(member.width for member in members)
        self.waves += 1
        self.requests += len(members)
        self.rows += rows
        self.padded_rows += buffers.rows - rows
        self.decode_passes += passes
