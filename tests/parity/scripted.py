"""A logit source without a model: a table of log-probabilities, for searches that fit on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flashrec_harness.references.types import Tokens


class Scripted:
    """``table[prefix]`` gives the weight of each next token; any other prefix weighs all tokens alike."""

    def __init__(self, vocab_size: int, table: Mapping[Tokens, Sequence[float]]) -> None:
        self.vocab_size = vocab_size
        self._table = table

    def next_logits(self, prompt: Tokens, prefixes: Sequence[Tokens]) -> NDArray[np.float64]:
        rows = [np.log(np.asarray(self._table.get(prefix, [1.0] * self.vocab_size))) for prefix in prefixes]
        return np.stack(rows)
