"""What large catalogs cost: reading, sorting, the trie and the cache, each in a process of its own."""

from __future__ import annotations
