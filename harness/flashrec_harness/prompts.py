"""From a purchase history to prompt token ids, through the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

INSTRUCTION = "Bought so far, oldest first: "
"""What the user message says before the semantic IDs. Checkpoints made here are trained with it."""

SidText = Callable[[str], str]
"""Item id to the text of its semantic ID, wrapped in begin and end tokens where the layout has them."""


class PromptBuilder:
    """Builds prompts for one tokenizer.

    ``tokenizer``: a transformers fast tokenizer with a chat template. ``sid_text_of``: see :data:`SidText`;
    it raises for an unknown item. A prompt ends where the assistant's turn starts; the begin token is the
    engine's to append.
    """

    def __init__(self, tokenizer: Any, sid_text_of: SidText) -> None:
        self._tokenizer = tokenizer
        self._sid_text_of = sid_text_of

    def text(self, history: Sequence[str]) -> str:
        """The prompt's text for item ids, oldest first."""
        content = INSTRUCTION + "".join(map(self._sid_text_of, history))
        messages = [{"role": "user", "content": content}]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def prompt(self, history: Sequence[str]) -> tuple[int, ...]:
        """The prompt's token ids for item ids, oldest first."""
        return self.prompts([history])[0]

    def prompts(self, histories: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
        """As :meth:`prompt`, for many histories in one tokenizer call."""
        texts = [self.text(history) for history in histories]
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [tuple(ids) for ids in encoded]
