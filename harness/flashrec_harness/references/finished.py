"""Search without a catalog: how ``transformers`` and SGLang treat hypotheses that reach a stop token.

Written from what their sources do (transformers 5.24.0 ``_beam_search`` with ``early_stopping="never"``, SGLang
0.5.21 ``srt/beam_search``), in float64 and for one request. Both rank candidates by the plain sum, both
decode greedily at width 1, and both take the best of the last step whatever their last token is. They
differ in how many candidates they look at, which stopped ones they bank, and when they end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flashrec.request import Semantics
from flashrec_harness.references.selection import Guide, Row, best_extensions, select_scores
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase, length_score

Expand = Callable[[SearchCase, Sequence[Row]], NDArray[np.float64]]
Finisher = Callable[[SearchCase, Expand, Guide], RankedList]


def _banked(row: Row, case: SearchCase) -> Hypothesis:
    score = length_score(row.cumulative, len(row.tokens), case.length_penalty)
    return Hypothesis(row.tokens, row.cumulative, score)


def _best(bank: Sequence[Hypothesis], width: int, guide: Guide) -> list[Hypothesis]:
    """The best ``width`` by score; on a tie the one banked first."""
    chosen = select_scores([h.score for h in bank], [h.token_ids for h in bank], width, guide)
    return [bank[index] for index in chosen]


def _greedy(case: SearchCase, expand: Expand, guide: Guide) -> RankedList:
    row = Row((), 0.0)
    for _ in range(case.max_tokens):
        (row,) = best_extensions([row], expand(case, [row]), 1, guide)
        if row.tokens[-1] in case.stop_token_ids:
            break
    return (_banked(row, case),)


def transformers_search(case: SearchCase, expand: Expand, guide: Guide) -> RankedList:
    """A bank of the best ``k``; a stopped candidate enters it only from among the step's first ``k``."""
    k, stops = case.beam_width, frozenset(case.stop_token_ids)
    if k == 1:
        return _greedy(case, expand, guide)
    running, bank = [Row((), 0.0)], list[Hypothesis]()
    for length in range(1, case.max_tokens + 1):
        last = length == case.max_tokens
        candidates = best_extensions(running, expand(case, running), max(2, 1 + len(stops)) * k, guide)
        ended = [row for row in candidates[:k] if last or row.tokens[-1] in stops]
        bank = _best([*bank, *(_banked(row, case) for row in ended)], k, guide)
        running = [row for row in candidates if row.tokens[-1] not in stops][:k]
        if last or _cannot_improve(case, bank, running, length):
            break
    return tuple(bank)


def _cannot_improve(case: SearchCase, bank: list[Hypothesis], running: list[Row], length: int) -> bool:
    """The bank is full and the best running sum, at its most favourable length, does not beat its worst."""
    favourable = case.max_tokens if case.length_penalty > 0 else length
    best = length_score(running[0].cumulative, favourable, case.length_penalty)
    return len(bank) == case.beam_width and best <= min(hypothesis.score for hypothesis in bank)


def sglang_search(case: SearchCase, expand: Expand, guide: Guide) -> RankedList:
    """An unbounded bank; a stopped candidate enters it while fewer than ``k`` survivors rank before it."""
    k, stops = case.beam_width, frozenset(case.stop_token_ids)
    if k == 1:
        return _greedy(case, expand, guide)
    running, bank = [Row((), 0.0)], list[Hypothesis]()
    for _ in range(case.max_tokens - 1):
        survivors = list[Row]()
        for row in best_extensions(running, expand(case, running), 2 * k, guide):
            if len(survivors) == k:
                break
            if row.tokens[-1] in stops:
                bank.append(_banked(row, case))
            else:
                survivors.append(row)
        if len(survivors) < k:
            bank.extend(_banked(row, case) for row in survivors)
            return tuple(_best(bank, k, guide))
        running = survivors
    final = best_extensions(running, expand(case, running), k, guide)
    return tuple(_best([*bank, *(_banked(row, case) for row in final)], k, guide))


FINISHERS: dict[Semantics, Finisher] = {
    "transformers": transformers_search,
    "sglang": sglang_search,
}
