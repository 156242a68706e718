"""Reads Parquet; apart from the other formats because it alone needs pyarrow."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pandas as pd
import pyarrow.parquet as pq


def parquet_frames(data: bytes, rows: int) -> Iterator[pd.DataFrame]:
    """The table in ``data``, at most ``rows`` rows at a time; one empty frame where there are none.

    Raises whatever pyarrow raises for a broken file.
    """
    file = pq.ParquetFile(io.BytesIO(data))
    if file.metadata.num_rows == 0:
        yield file.schema_arrow.empty_table().to_pandas(ignore_metadata=True)
    # Row group by row group: asked for several, pyarrow decodes them all before the first rows come out.
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
            # Without pandas' metadata: it can turn item_id into the index, where no column has that name.
            yield batch.to_pandas(ignore_metadata=True)
