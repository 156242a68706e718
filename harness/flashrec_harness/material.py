"""What a suite feeds a checkpoint with: its tokenizer, layout, catalog, and prompts from real histories."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flashrec.errors import CatalogError
from flashrec.sid.catalog import Catalog, load_catalog
from flashrec.sid.layout import SidLayout, infer_layout
from flashrec.sid.peek import peek_depth
from flashrec_harness.checkpoints.sequences import History, read_histories
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.prompts import PromptBuilder

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Material:
    """``layout`` and ``catalog`` are ``None`` for a checkpoint that is judged without a catalog."""

    tokenizer: Any
    layout: SidLayout | None
    sid_vocab_file: Path | None
    sequences: Path

    @cached_property
    def catalog(self) -> Catalog | None:
        """Read when it is first wanted: a process that measures random prompts has the engine's already. Raises
        :class:`CatalogError`."""
        if self.layout is None or self.sid_vocab_file is None:
            return None
        return load_catalog(self.sid_vocab_file, self.layout)

    @cached_property
    def histories(self) -> list[History]:
        """Held-out histories. Raises :class:`CatalogError` where the file is missing or malformed."""
        if not self.sequences.is_file():
            raise CatalogError(f"{self.sequences}: no held-out histories; name a CSV with --sequences")
        return read_histories(self.sequences)

    def history_prompts(self, count: int) -> list[Prompt]:
        """Prompts from the first ``count`` histories, through the checkpoint's chat template."""
        if self.layout is None or self.catalog is None:
            raise CatalogError("prompts from histories need a catalog; name one with --sid-vocab-file")
        builder = PromptBuilder(self.tokenizer, self.layout, self.catalog)
        return builder.prompts([history.items for history in self.histories[:count]])

    def random_prompts(self, count: int, tokens: int, seed: int) -> list[Prompt]:
        """``count`` prompts of ``tokens`` random ids over the whole vocabulary, seeded."""
        ids = np.random.default_rng(seed).integers(0, len(self.tokenizer), (count, tokens))
        return [tuple(int(token) for token in row) for row in ids]


def load_material(context: SuiteContext) -> Material:
    """Read the tokenizer, and how the catalog's semantic IDs are spelt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(context.model_path)
    sequences = context.sequences or context.model_path / "test.csv"
    if context.sid_vocab_file is None:
        return Material(tokenizer, None, None, sequences)
    depth = peek_depth(context.sid_vocab_file)
    layout = infer_layout(tokenizer, depth=depth, override=context.sid)
    return Material(tokenizer, layout, context.sid_vocab_file, sequences)


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """16 hex digits over the token ids of all prompts, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.asarray([len(prompt), *prompt], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
