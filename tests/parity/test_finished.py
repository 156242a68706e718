"""The two rules for stop tokens, on searches that fit on paper.

The table of :class:`~scripted.Scripted` gives weights; a step's probability is its share of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from scripted import Scripted

from flashrec.request import Semantics
from flashrec_harness.references.grammar import Grammar
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.types import SearchCase, Tokens


def no_grammar(_: SearchCase) -> Grammar:
    raise AssertionError("a free search has no grammar")


def search(semantics: Semantics, table: Mapping[Tokens, Sequence[float]], **fields: Any) -> list[tuple[Tokens, float]]:
    """Token ids and score of each hypothesis of a beam of two, two tokens long unless ``fields`` say otherwise."""
    vocab = len(next(iter(table.values())))
    case = SearchCase(name="paper", prompt=(0,), n=2, beam_width=2, max_tokens=2, semantics=semantics)
    ranked = Oracle(Scripted(vocab, table), no_grammar).rank(replace(case, **fields))
    return [(hypothesis.token_ids, hypothesis.score) for hypothesis in ranked]


def row(vocab: int, **shares: float) -> list[float]:
    """Weights of ``t<token>=share``; every other token weighs next to nothing."""
    return [shares.get(f"t{token}", 1e-9) for token in range(vocab)]


def log(share: float, length: int = 1) -> Any:
    return pytest.approx(math.log(share) / length, abs=1e-6)


def test_a_stop_of_rank_k_ahead_of_the_kth_survivor_is_banked_by_sglang_alone() -> None:
    """Ranks: 0, stop 2, stop 3, 1. After token 0 all twenty tokens are alike: a share of .02 for two tokens."""
    table = {(): row(20, t0=0.40, t1=0.14, t2=0.26, t3=0.20)}
    assert search("sglang", table, stop_token_ids=(2, 3)) == [((2,), log(0.26)), ((3,), log(0.20))]
    assert search("transformers", table, stop_token_ids=(2, 3)) == [((2,), log(0.26)), ((0, 0), log(0.02, 2))]


def test_a_stop_behind_the_kth_survivor_is_banked_by_neither() -> None:
    """Ranks: 0, 1, stop 2. Nothing of two tokens reaches its share, and still it is not returned."""
    table = {(): row(20, t0=0.40, t1=0.35, t2=0.25)}
    for semantics in ("sglang", "transformers"):
        assert (2,) not in dict(search(semantics, table, stop_token_ids=(2,)))


def test_sglang_ends_when_fewer_than_k_survive_and_returns_what_is_left_unfinished() -> None:
    """Ranks: 0, stop 3, stop 4, stop 5, and SGLang looks at four. ``transformers`` looks at eight and goes on."""
    table = {(): row(20, t0=0.50, t3=0.30, t4=0.15, t5=0.05), (0,): row(20, t1=1.0), (0, 1): row(20, t1=1.0)}
    options = {"stop_token_ids": (3, 4, 5), "max_tokens": 3}
    assert search("sglang", table, **options) == [((0,), log(0.50)), ((3,), log(0.30))]
    assert search("transformers", table, **options)[0] == ((0, 1, 1), log(0.50, 3))


def test_transformers_ends_when_no_running_hypothesis_can_improve_the_bank() -> None:
    """Both places of the bank are taken at step one. What runs on has .05, at best as good by six tokens.

    Were it divided by the six tokens that are left, log(.05) / 6 = -.50 would beat log(.35) = -1.05.
    """
    certain = {(0,) * length: row(9, t0=1.0) for length in range(1, 6)}
    table = {(): row(9, t0=0.05, t3=0.60, t4=0.35), **certain}
    options = {"stop_token_ids": (3, 4), "max_tokens": 6}
    ended = search("transformers", table, **options, length_penalty=0.0)
    assert ended == [((3,), log(0.60)), ((4,), log(0.35))]
    assert ((0,) * 6, log(0.05, 6)) in search("transformers", table, **options, length_penalty=1.0)


def test_the_bank_of_transformers_keeps_its_best_and_that_of_sglang_all() -> None:
    """A stop that leads at step one is pushed out at the last step by two that score above it."""
    table = {(): row(9, t0=0.45, t1=0.30, t3=0.25), (0,): row(9, t0=1.0), (1,): row(9, t0=1.0)}
    for semantics in ("sglang", "transformers"):
        found = search(semantics, table, stop_token_ids=(3,))
        assert [tokens for tokens, _ in found] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("semantics", ["transformers", "sglang"])
def test_a_width_of_one_is_greedy(semantics: Semantics) -> None:
    """It ends at the stop; a beam search of width one would bank it and go on with the runner-up."""
    table = {(): row(4, t0=0.3, t3=0.7), (0,): row(4, t0=1.0)}
    found = search(semantics, table, n=1, beam_width=1, max_tokens=3, stop_token_ids=(3,))
    assert found == [((3,), log(0.7))]


@pytest.mark.parametrize("semantics", ["transformers", "sglang"])
def test_the_last_step_takes_the_best_whatever_their_last_token_is(semantics: Semantics) -> None:
    table = {(): [0.1, 0.2, 0.3, 0.4]}
    found = search(semantics, table, max_tokens=1, stop_token_ids=(3,))
    assert found == [((3,), log(0.4)), ((2,), log(0.3))]
