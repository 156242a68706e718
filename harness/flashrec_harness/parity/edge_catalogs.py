"""Catalogs with the shapes that break a trie search: collisions, chains, too few items, one to five levels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashrec_harness.parity.edge_checkpoint import CODEBOOK_SIZE, LEVELS, WORDS, make_edge_checkpoint
from flashrec_harness.parity.ground import CatalogGround, Ground
from flashrec_harness.references.grammar import Codes, SidVocabulary

_PROMPTS = 24


@dataclass(frozen=True, slots=True)
class EdgeCatalog:
    """Distinct semantic IDs and the items of each; ``name`` says what it is meant to break."""

    name: str
    items: dict[Codes, list[str]]

    @property
    def depth(self) -> int:
        return len(next(iter(self.items)))

    def write(self, path: Path) -> Path:
        """The catalog as ``{"a,b,c": [item, ...]}``."""
        text = {",".join(map(str, codes)): items for codes, items in self.items.items()}
        path.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
        return path

    def cut(self, vocabulary: SidVocabulary) -> SidVocabulary:
        """``vocabulary`` with this catalog's levels only."""
        return SidVocabulary(vocabulary.codebooks[: self.depth], vocabulary.begin, vocabulary.end)


def edge_ground(directory: Path, seed: int) -> Ground:
    """The edge checkpoint with all edge catalogs, written into ``directory``; prompts are random words."""
    model_path = directory / "edge-model"
    vocabulary = make_edge_checkpoint(model_path, seed)
    generator = np.random.default_rng(seed)
    catalogs = edge_catalogs(seed)
    return Ground(
        name="edge checkpoint",
        model_path=model_path,
        catalogs={
            catalog.name: CatalogGround(
                path=catalog.write(directory / f"{catalog.name.replace(' ', '-')}.json"),
                sids=tuple(sorted(catalog.items)),
                vocabulary=catalog.cut(vocabulary),
            )
            for catalog in catalogs
        },
        prompts=tuple(
            tuple(int(word) for word in generator.integers(WORDS, size=length))
            for length in generator.integers(2, 40, size=_PROMPTS)
        ),
        eos=(WORDS,),
    )


def edge_catalogs(seed: int) -> list[EdgeCatalog]:
    """One random catalog per depth from 1 to 5, and one for each shape of its own."""
    generator = np.random.default_rng(seed)
    catalogs = [
        _random(f"{depth} level{'s' if depth > 1 else ''}", depth, count, generator)
        for depth, count in zip(range(1, LEVELS + 1), (9, 60, 300, 400, 400), strict=True)
    ]
    return [
        *catalogs,
        _colliding(generator),
        _chains(generator),
        _random("fewer than n", 3, 5, generator),
        _random("a single item", 3, 1, generator),
    ]


def _codes(depth: int, count: int, generator: np.random.Generator) -> list[Codes]:
    space = CODEBOOK_SIZE**depth
    ranks = generator.choice(space, size=min(count, space), replace=False)
    digits = [(ranks // CODEBOOK_SIZE**level) % CODEBOOK_SIZE for level in range(depth)]
    return [tuple(int(code) for code in codes) for codes in zip(*digits, strict=True)]


def _random(name: str, depth: int, count: int, generator: np.random.Generator) -> EdgeCatalog:
    codes = _codes(depth, count, generator)
    return EdgeCatalog(name, {sid: [f"item-{index}"] for index, sid in enumerate(codes)})


def _colliding(generator: np.random.Generator) -> EdgeCatalog:
    """Forty semantic IDs that share a hundred and twenty items."""
    codes = _codes(3, 40, generator)
    return EdgeCatalog(
        "colliding items", {sid: [f"item-{index}-{copy}" for copy in range(3)] for index, sid in enumerate(codes)}
    )


def _chains(generator: np.random.Generator) -> EdgeCatalog:
    """After the first code there is never a choice: every prefix has a single child."""
    rest = generator.integers(CODEBOOK_SIZE, size=(CODEBOOK_SIZE, 3))
    return EdgeCatalog(
        "single-child chains",
        {(first, *map(int, codes)): [f"item-{first}"] for first, codes in enumerate(rest)},
    )
