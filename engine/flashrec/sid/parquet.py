"""Reads Parquet; apart from the other formats because it alone needs pyarrow."""

from __future__ import annotations

import io
from itertools import islice

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(data: bytes, rows: int | None = None) -> pd.DataFrame:
    """The table in ``data``, or its first ``rows`` rows. Raises whatever pyarrow raises for a broken file."""
    file = pq.ParquetFile(io.BytesIO(data))
    table = file.read() if rows is None else _first_rows(file, rows)
    # Without pandas' metadata: it can turn item_id into the index, where no column of that name is found.
    frame: pd.DataFrame = table.to_pandas(ignore_metadata=True)
    return frame


def _first_rows(file: pq.ParquetFile, rows: int) -> pa.Table:
    first_group = list(range(min(1, file.num_row_groups)))  # of more groups, all would be decoded
    batches = file.iter_batches(batch_size=rows, row_groups=first_group)
    return pa.Table.from_batches(islice(batches, 1), schema=file.schema_arrow)
