"""``/v1/recommend``'s prompt: a Jinja template over a purchase history.

The template's output is the prompt's text. It sees ``history``, a list of entries with ``sid`` (the
semantic ID's text between its begin and end tokens, where there are any), ``codes``, ``item`` and ``title``
(each empty where unknown), and ``chat(content)``, the checkpoint's chat template around one user message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from flashrec.errors import ConfigError, RequestError
from flashrec.server.text import TextCodec

DEFAULT_TEMPLATE = '{{ chat("Bought so far, oldest first: " ~ history | map(attribute="sid") | join) }}'
"""The prompt that ``flashrec-harness make-checkpoint`` trains with."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One item of a history, as the template sees it."""

    sid: str
    codes: tuple[int, ...]
    item: str = ""
    title: str = ""


class HistoryPrompt:
    """A compiled template. Raises :class:`ConfigError` when it is not valid Jinja."""

    def __init__(self, path: Path | None, codec: TextCodec) -> None:
        self._codec = codec
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
        environment.globals["chat"] = self._chat
        try:
            source = DEFAULT_TEMPLATE if path is None else path.read_text(encoding="utf-8")
            self._template = environment.from_string(source)
        except (TemplateError, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt_template: {path}: {error}") from None

    def token_ids(self, history: Sequence[HistoryEntry]) -> tuple[int, ...]:
        """The prompt for ``history``, oldest first. Raises :class:`RequestError` when the template does."""
        try:
            text = self._template.render(history=history)
        except TemplateError as error:
            raise RequestError("history", f"the prompt template fails on it: {error}") from None
        return self._codec.encode(text, add_special_tokens=False)

    def _chat(self, content: str) -> str:
        return self._codec.chat([{"role": "user", "content": content}])
