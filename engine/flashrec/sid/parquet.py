"""Reads Parquet; apart from the other formats because it alone needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flashrec.sid.bulk import LARGEST_CODE
from flashrec.sid.strings import StringTable


class ParquetPart:
    """Some rows of a Parquet file: :class:`flashrec.sid.tables.TablePart`, columns straight from Arrow's buffers."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.names = [str(name) for name in batch.schema.names]
        self._batch = batch

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def cells(self, name: str) -> list[object]:
        values: list[object] = self._column(name).to_pylist()
        return values

    def codes(self, names: list[str]) -> NDArray[np.int32] | None:
        codes = np.empty((len(self), len(names)), dtype=np.int32)
        for level, name in enumerate(names):
            column = self._column(name)
            if not pa.types.is_integer(column.type) or column.null_count or not len(column):
                return None
            values = column.to_numpy()
            if values.min() < 0 or values.max() > LARGEST_CODE:
                return None
            codes[:, level] = values
        return codes

    def texts(self, name: str) -> StringTable | None:
        column = self._column(name)
        if pa.types.is_integer(column.type):
            column = pc.cast(column, pa.large_string())
        if column.null_count or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            return None
        wide = column.cast(pa.large_string())
        _, offsets, data = wide.buffers()
        ends = np.frombuffer(offsets, dtype=np.int64)[wide.offset : wide.offset + len(wide) + 1]
        blob = np.frombuffer(data if data is not None else b"", dtype=np.uint8)
        return StringTable(blob[ends[0] : ends[-1]], ends - ends[0])

    def _column(self, name: str) -> pa.Array:
        return self._batch.column(self.names.index(name))


def parquet_parts(data: bytes, rows: int) -> Iterator[ParquetPart]:
    """The table in ``data``, at most ``rows`` rows at a time; one empty part where there are none.

    Raises whatever pyarrow raises for a broken file.
    """
    file = pq.ParquetFile(pa.BufferReader(data))
    if file.metadata.num_rows == 0:
        yield ParquetPart(pa.RecordBatch.from_pylist([], schema=file.schema_arrow))
    # Row group by row group: asked for several, pyarrow decodes them all before the first rows come out.
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
            # Of a string that is no UTF-8 Arrow says nothing until somebody reads it.
            batch.validate(full=True)
            yield ParquetPart(batch)
