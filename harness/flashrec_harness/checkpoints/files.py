"""Writing a catalog beside a checkpoint."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from flashrec.sid import Catalog, SidLayout


def write_catalog(catalog: Catalog, path: Path) -> None:
    """``{"a,b,c": [item, ...]}``, one SID per line."""
    lines = [
        f"{json.dumps(','.join(map(str, sid)))}: {json.dumps(list(catalog.items_of(rank)), ensure_ascii=False)}"
        for rank, sid in enumerate(catalog.sids.tolist())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_items(catalog: Catalog, layout: SidLayout, path: Path) -> None:
    """A tab-separated table of ``item_id``, ``sid`` (the joined tokens) and, if known, ``title``."""
    titles = catalog.titles
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["item_id", "sid"] + ([] if titles is None else ["title"]))
        for rank, sid in enumerate(catalog.sids.tolist()):
            text = layout.text(sid)
            for i in range(catalog.item_start[rank], catalog.item_start[rank + 1]):
                writer.writerow([catalog.items[i], text] + ([] if titles is None else [titles[i]]))
