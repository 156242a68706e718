"""Semantic IDs: where their tokens stand, which of them exist, and the prefix tree of those."""

from __future__ import annotations

from flashrec.sid.catalog import Catalog, load_catalog
from flashrec.sid.layout import SidLayout, infer_layout
from flashrec.sid.peek import peek_depth
from flashrec.sid.trie import Trie, build_trie

__all__ = ["Catalog", "SidLayout", "Trie", "build_trie", "infer_layout", "load_catalog", "peek_depth"]
