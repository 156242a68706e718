"""A real catalogue: Amazon "Industrial and Scientific" as MiniOneRec published it.

``FLASHREC_AMAZON_DIR`` names the folder with its ``index.json`` and ``items.tsv``.
"""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from sid_files import codebook_tokens, groups, make_tokenizer

from flashrec.sid.catalog import load_catalog
from flashrec.sid.layout import infer_layout
from flashrec.sid.peek import peek_depth
from flashrec.sid.stats import catalog_stats
from flashrec.sid.trie import build_trie

FOLDER = Path(os.environ.get("FLASHREC_AMAZON_DIR", ""))

pytestmark = pytest.mark.skipif(
    not os.environ.get("FLASHREC_AMAZON_DIR"),
    reason="FLASHREC_AMAZON_DIR is not set: it names the folder with the Amazon catalogue",
)


@pytest.mark.parametrize("name", ["index.json", "items.tsv"])
def test_the_catalogue_is_read_whole(name: str) -> None:
    layout = infer_layout(make_tokenizer(codebook_tokens((256, 256, 256), prefix="")), depth=peek_depth(FOLDER / name))
    catalog = load_catalog(FOLDER / name, layout)
    index: dict[str, list[str]] = json.loads((FOLDER / "index.json").read_text())
    expected: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for item, tokens in index.items():
        expected[tuple(int(token[3:-1]) for token in tokens)].append(item)
    assert groups(catalog) == dict(expected)
    figures = catalog_stats(catalog, build_trie(catalog.sids, layout.sizes))
    assert (figures.num_sids, figures.num_items, figures.sharing_items) == (3670, 3686, 31)
    assert [level.codes_used for level in figures.levels] == [48, 256, 256]


def test_titles_and_targets() -> None:
    catalog = load_catalog(FOLDER / "items.tsv", None)
    with (FOLDER / "items.tsv").open(newline="") as file:
        titles = {line.split("\t")[0]: line.rstrip("\n").split("\t")[2] for line in list(file)[1:]}
    assert catalog.titles is not None
    assert dict(zip(catalog.items, catalog.titles, strict=True)) == titles
    with (FOLDER / "test.csv").open(newline="") as file:
        targets = {row["target_item_id"] for row in csv.DictReader(file)}
    ranks = catalog.ranks_of_items(targets)
    named = np.zeros(catalog.num_sids, dtype=np.bool_)
    named[ranks] = True
    assert all(set(catalog.items_of(rank)).isdisjoint(targets) != bool(flag) for rank, flag in enumerate(named))
