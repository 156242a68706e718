"""From a purchase history to prompt token ids, through the checkpoint's chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from flashrec.errors import CatalogError
from flashrec.sid import Catalog, SidLayout
from flashrec.sid.codes import NotationError, parse_sid

INSTRUCTION = "Bought so far, oldest first: "
"""What the user message says before the semantic IDs. Checkpoints made here are trained with it."""

TEMPLATE_TEXTS = (INSTRUCTION, "system\n", "user\n", "assistant\n")
"""All plain text that a prompt can hold: a tokenizer trained here gets it into few tokens."""


class PromptBuilder:
    """Builds prompts for one checkpoint.

    ``tokenizer``: a transformers fast tokenizer with a chat template. A history becomes a user message that
    lists the semantic IDs, each between the layout's begin and end token. The prompt ends where the
    assistant's turn starts; appending the begin token is the engine's part.
    """

    def __init__(self, tokenizer: Any, layout: SidLayout, catalog: Catalog) -> None:
        self.tokenizer = tokenizer
        self._layout = layout
        self._catalog = catalog
        self._sids = catalog.sids
        self._rank_of_item = ranks_by_item(catalog)

    def rank(self, item: str) -> int:
        """The row in ``Catalog.sids`` of an item id, or of a semantic ID in any notation.

        Raises :class:`CatalogError` for what the catalog does not have.
        """
        rank = self._rank_of_item.get(item)
        if rank is not None:
            return rank
        with contextlib.suppress(NotationError):
            codes = parse_sid(item, self._layout)
            if len(codes) == self._catalog.depth and (found := int(self._catalog.rank([codes])[0])) >= 0:
                return found
        raise CatalogError(f"{self._catalog.path}: no item {item!r} in the catalog")

    def item(self, name: str) -> str:
        """``name`` if it is an item id, else the first item of the semantic ID that it is."""
        return name if name in self._rank_of_item else self._catalog.items_of(self.rank(name))[0]

    def sid_text(self, item: str) -> str:
        """The wrapped semantic ID of an item. Raises :class:`CatalogError` for an unknown item."""
        sid = self._sids[self.rank(item)].tolist()
        return self._layout.begin_text + self._layout.text(sid) + self._layout.end_text

    def text(self, history: Sequence[str]) -> str:
        """The prompt's text for item ids, oldest first."""
        content = INSTRUCTION + "".join(map(self.sid_text, history))
        messages = [{"role": "user", "content": content}]
        text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def prompt(self, history: Sequence[str]) -> tuple[int, ...]:
        """The prompt's token ids for item ids, oldest first."""
        return self.prompts([history])[0]

    def prompts(self, histories: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        """As :meth:`prompt`, for many histories in one tokenizer call."""
        texts = [self.text(history) for history in histories]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [tuple(ids) for ids in encoded]


def ranks_by_item(catalog: Catalog) -> dict[str, int]:
    """Item id to its row in ``catalog.sids``; an item under several SIDs keeps the first."""
    out: dict[str, int] = {}
    for rank in range(catalog.num_sids):
        for item in catalog.items_of(rank):
            out.setdefault(item, rank)
    return out
