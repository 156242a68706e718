"""What both sides of a comparison must agree on beforehand: checkpoint, catalogs, prompts, stop tokens."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrec.sid.layout import SidLayout
from flashrec_harness.material import load_material
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.references.grammar import Codes, Grammar, SidVocabulary
from flashrec_harness.references.types import SearchCase, Tokens

CATALOG = "catalog"
"""Key of the catalog that the judged checkpoint is served with."""

_LARGEST_CATALOG = 500_000
"""Semantic IDs that the references still hold as Python sets: about 1 GB and two seconds per filter."""

_GRAMMARS_KEPT = 16
_RANDOM_PROMPTS = 32
_RANDOM_PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class CatalogGround:
    """A catalog as a file for the engine, and as plain semantic IDs for the references."""

    path: Path
    sids: tuple[Codes, ...]
    vocabulary: SidVocabulary

    def grammar(self, case: SearchCase | None = None) -> Grammar:
        """The grammar of ``case``, or the whole catalog's."""
        if case is None:
            return Grammar(self.sids, self.vocabulary)
        return Grammar(
            self.sids,
            self.vocabulary,
            exclude=case.exclude,
            allow=case.allow,
            score_end=case.score_end,
        )


@dataclass(frozen=True)
class Ground:
    """One checkpoint and everything that is searched on it. ``left_out`` says what cannot be, and why."""

    name: str
    model_path: Path
    catalogs: Mapping[str, CatalogGround]
    prompts: tuple[Tokens, ...]
    eos: Tokens
    sid: str | None = None
    left_out: str = ""
    _grammars: OrderedDict[tuple[object, ...], Grammar] = field(default_factory=OrderedDict, repr=False, compare=False)

    def grammar_of(self, case: SearchCase) -> Grammar:
        """The grammar of a catalog case; built once for all cases with the same catalog and filters."""
        assert case.catalog is not None
        key = (case.catalog, case.exclude, case.allow, case.score_end)
        if key not in self._grammars:
            self._grammars[key] = self.catalogs[case.catalog].grammar(case)
            if len(self._grammars) > _GRAMMARS_KEPT:
                self._grammars.popitem(last=False)
        return self._grammars[key]

    def whole_grammars(self) -> dict[str, Grammar]:
        """Every catalog's grammar without filters, by its key."""
        return {name: catalog.grammar() for name, catalog in self.catalogs.items()}


def sid_vocabulary(layout: SidLayout) -> SidVocabulary:
    """A layout's token ids, as the references take them."""
    codebooks = tuple(tuple(int(token) for token in tokens) for tokens in layout.codebooks)
    return SidVocabulary(codebooks, layout.begin, layout.end)


def context_ground(context: SuiteContext) -> Ground:
    """The checkpoint that a suite is asked to judge, with prompts from its held-out histories.

    Without a catalog or without histories the prompts are random token ids.
    """
    material = load_material(context)
    catalogs: dict[str, CatalogGround] = {}
    left_out = ""
    if material.catalog is not None and material.catalog.num_sids > _LARGEST_CATALOG:
        left_out = f"{material.catalog.num_sids:,} semantic IDs; the references hold up to {_LARGEST_CATALOG:,}"
    elif material.catalog is not None and material.layout is not None:
        sids = tuple(tuple(int(code) for code in row) for row in material.catalog.sids)
        catalogs[CATALOG] = CatalogGround(material.catalog.path, sids, sid_vocabulary(material.layout))
    if catalogs and material.sequences.is_file():
        prompts: Sequence[Tokens] = material.history_prompts(_RANDOM_PROMPTS * 2)
    else:
        prompts = material.random_prompts(_RANDOM_PROMPTS, _RANDOM_PROMPT_TOKENS, context.seed)
    return Ground(
        name="this checkpoint",
        model_path=context.model_path,
        catalogs=catalogs,
        prompts=tuple(prompts),
        eos=checkpoint_eos(context.model_path, material.tokenizer),
        sid=context.sid,
        left_out=left_out,
    )


def checkpoint_eos(model_path: Path, tokenizer: Any) -> Tokens:
    """Every token that some engine would stop at by itself: of the configs and of the tokenizer."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_path / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return tuple(sorted(found))
