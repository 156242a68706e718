"""Text to token ids and back, safe to call from several threads at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from flashrec.errors import LayoutError, RequestError
from flashrec.request import Beam
from flashrec.sid.layout import SidLayout

PromptValue = str | list[str] | list[int] | list[list[int]]
"""A prompt as clients send it: text or token ids, one or a list of them."""


class TextCodec:
    """A checkpoint's tokenizer and semantic-ID layout.

    Encoding goes to a private copy of the Rust tokenizer, without truncation: the ``transformers`` wrapper
    sets truncation on every call, which fails ("Already borrowed") when two threads do it at once.
    """

    def __init__(self, tokenizer: Any, layout: SidLayout | None) -> None:
        self._wrapper = tokenizer
        self.layout = layout
        self._texts = () if layout is None else layout.texts
        # Fixed-width arrays: 512 beams' texts take 109 us from these and 319 from objects all over memory, which are
        # not in the processor's cache when an answer is written (Intel Xeon, 2026-12-02). JSON holds no zero bytes.
        self._quoted = tuple(np.array([orjson.dumps(text)[1:-1] for text in texts]) for texts in self._texts)
        self._fast: Tokenizer | None = None
        if tokenizer is not None:
            self._fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._fast.no_truncation()
            self._fast.no_padding()

    @property
    def has_chat_template(self) -> bool:
        return self._wrapper is not None and bool(self._wrapper.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of ``text``. Raises :class:`RequestError` on ``text`` where there is no tokenizer."""
        if self._fast is None:
            raise RequestError("text", "this checkpoint has no tokenizer: send token ids")
        return tuple(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def prompts(self, field: str, value: PromptValue, limit: int) -> tuple[list[tuple[int, ...]], bool]:
        """Token ids of each prompt in ``value``, and whether ``value`` was a list of prompts.

        Raises :class:`RequestError` on ``field`` for more than ``limit`` of them.
        """
        if isinstance(value, str):
            return [self.encode(value)], False
        if not value or isinstance(value[0], int):
            return [tuple(cast("list[int]", value))], False
        if len(value) > limit:
            raise RequestError(field, f"holds {len(value)} prompts, at most {limit} are taken")
        many = value
        return [self.encode(each) if isinstance(each, str) else tuple(each) for each in many], True

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt's text for a conversation. Raises :class:`RequestError` on ``messages``."""
        if not self.has_chat_template:
            raise RequestError("messages", "this checkpoint has no chat template: use /v1/completions")
        from jinja2 import TemplateError

        try:
            text: str = self._wrapper.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise RequestError("messages", f"the chat template refuses them: {error}") from None
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; empty where there is no tokenizer."""
        if self._fast is None:
            return ""
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def beams(self, beams: Sequence[Beam], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each of a request's beams: its semantic ID's tokens, or its tokens up to a stop token."""
        if beams and beams[0].sid is not None:
            columns = zip(*(beam.sid or () for beam in beams), strict=True)
            texts = (map(level.__getitem__, column) for level, column in zip(self._texts, columns, strict=True))
            return list(map("".join, zip(*texts, strict=True)))
        return [
            self.decode(
                beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids,
                skip_special_tokens=skip_special_tokens,
            )
            for beam in beams
        ]

    def quoted(self, sids: NDArray[np.int32]) -> list[bytes]:
        """:meth:`beams` of semantic IDs int32 [n, depth], as what stands between quotes in JSON."""
        # Those of the engine need no check: 50 of them a request are a tenth of its answer's time with one.
        texts = (level.take(codes).tolist() for level, codes in zip(self._quoted, sids.T, strict=True))
        return list(map(b"".join, zip(*texts, strict=True)))

    def parse_sid(self, text: str) -> tuple[int, ...] | None:
        """The codes of a semantic ID's text, or ``None`` if it is something else, such as an item id."""
        if self.layout is None:
            return None
        try:
            return self.layout.parse(text)
        except LayoutError:
            return None

    def wrapped_sid(self, sid: Sequence[int]) -> str:
        """A semantic ID's text between its begin and end tokens, where the layout has them."""
        assert self.layout is not None
        return f"{self.layout.begin_text}{self.layout.text(sid)}{self.layout.end_text}"
