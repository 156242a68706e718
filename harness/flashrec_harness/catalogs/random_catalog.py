"""Random catalogs of any size as Parquet. Without torch: the process that is measured imports this."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flashrec.sid.layout import SidLayout

SIZES = (8192, 8192, 8192)
_ROWS = 1 << 20


def write_parquet(path: Path, sids: NDArray[np.int32]) -> None:
    """One row per SID: ``item_id`` ``item-<row>`` and a ``code_<level>`` column per level."""
    levels = [f"code_{level}" for level in range(sids.shape[1])]
    schema = pa.schema([("item_id", pa.string()), *((name, pa.int16()) for name in levels)])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, len(sids), _ROWS):
            part = sids[first : first + _ROWS]
            numbers = pc.cast(pa.array(np.arange(first, first + len(part))), pa.string())
            items = pc.binary_join_element_wise("item", numbers, "-")
            codes = [pa.array(np.ascontiguousarray(column), pa.int16()) for column in part.T]
            writer.write_table(pa.table([items, *codes], schema=schema))


def random_layout(sizes: tuple[int, ...] = SIZES) -> SidLayout:
    """Codebooks one behind the other from token 0 on, without begin and end token."""
    stops = np.cumsum(sizes)
    return SidLayout(
        codebooks=tuple(np.arange(stop - size, stop, dtype=np.int32) for size, stop in zip(sizes, stops, strict=True)),
        texts=tuple(tuple(f"<s_{chr(97 + level)}_{code}>" for code in range(size)) for level, size in enumerate(sizes)),
    )
