"""The oracle itself: against exhaustive enumeration, on paper, and with near-ties."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted import Scripted

from flashrec.request import ScoreSpace
from flashrec_harness.references.grammar import Codes, Grammar, SidVocabulary
from flashrec_harness.references.oracle import Oracle, explain, log_softmax
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase, Tokens

VOCABULARY = SidVocabulary(codebooks=((7, 2, 5), (1, 6), (4, 0, 3)), begin=None, end=9)
VOCAB = 12
BAND = 5e-5


class Seeded:
    """Logits drawn from a seed and the prefix alone."""

    vocab_size = VOCAB

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def next_logits(self, prompt: Tokens, prefixes: list[Tokens]) -> np.ndarray:
        rows = [np.random.default_rng([self._seed, *prompt, 99, *prefix]).normal(size=VOCAB) for prefix in prefixes]
        return np.stack(rows)


def case(**fields: object) -> SearchCase:
    plain = SearchCase(name="case", prompt=(1,), n=99, beam_width=99, max_tokens=0, catalog="catalog")
    return replace(plain, **fields)  # type: ignore[arg-type]


def by_enumeration(source: Seeded, search: SearchCase, grammar: Grammar) -> dict[Tokens, float]:
    """Every legal semantic ID with the sum of its log-probabilities, from torch's own log-softmax."""
    sums = {}
    for codes in grammar.legal:
        tokens = VOCABULARY.token_ids(codes)
        emitted = (*tokens, 9) if search.score_end else tokens
        total = 0.0
        for length, token in enumerate(emitted):
            logits = torch.from_numpy(source.next_logits(search.prompt, [emitted[:length]])[0])
            over = normalised_over(search, grammar, emitted[:length])
            total += float(torch.log_softmax(logits[over], dim=0)[over.index(token)])
        sums[(*tokens, 9)] = total
    return sums


def normalised_over(search: SearchCase, grammar: Grammar, prefix: Tokens) -> list[int]:
    """SPEC B3, spelled out."""
    end = [9] if search.score_end else []
    level = len(prefix)
    if search.space is ScoreSpace.VOCAB:
        return list(range(VOCAB))
    if search.space is ScoreSpace.SID:
        return [*(token for codebook in VOCABULARY.codebooks for token in codebook), *end]
    if level == 3:
        return end
    if search.space is ScoreSpace.LEVEL:
        return list(VOCABULARY.codebooks[level])
    legal = [VOCABULARY.token_ids(codes) for codes in grammar.legal]
    return sorted({tokens[level] for tokens in legal if tokens[:level] == prefix})


sids = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2)), min_size=1)


@given(
    seed=st.integers(0, 10**6),
    legal=sids,
    space=st.sampled_from(ScoreSpace),
    score_end=st.booleans(),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_a_beam_as_wide_as_the_catalog_finds_it_all_in_order(
    seed: int, legal: set[Codes], space: ScoreSpace, score_end: bool, penalty: float
) -> None:
    search = case(space=space, score_end=score_end, length_penalty=penalty)
    grammar = Grammar(legal, VOCABULARY, score_end=score_end)
    ranked = Oracle(Seeded(seed), lambda _: grammar).rank(search)
    expected = by_enumeration(Seeded(seed), search, grammar)
    assert [h.token_ids for h in ranked] == sorted(expected, key=lambda tokens: -expected[tokens])
    for hypothesis in ranked:
        assert hypothesis.cumulative == pytest.approx(expected[hypothesis.token_ids], abs=1e-12)
        assert hypothesis.score == pytest.approx(hypothesis.cumulative / 4**penalty, abs=1e-12)


@given(seed=st.integers(0, 10**6), legal=sids, data=st.data())
def test_filters_are_legality(seed: int, legal: set[Codes], data: st.DataObject) -> None:
    """Excluding and allowing is the same as a catalog without the rest, in the normaliser too."""
    every = sorted(product(range(3), range(2), range(3)))
    exclude = tuple(data.draw(st.lists(st.sampled_from(every), unique=True)))
    allow = data.draw(st.none() | st.lists(st.sampled_from(every), unique=True).map(tuple))
    left = {codes for codes in legal if codes not in exclude and (allow is None or codes in allow)}
    filtered = Grammar(legal, VOCABULARY, exclude=exclude, allow=allow)
    search = case(space=ScoreSpace.CHILDREN)
    ranked = Oracle(Seeded(seed), lambda _: filtered).rank(search)
    assert ranked == Oracle(Seeded(seed), lambda _: Grammar(left, VOCABULARY)).rank(search)


def test_ties_go_to_the_lower_parent_rank_and_then_to_the_lower_token() -> None:
    source = Scripted(4, {(): [1, 2, 2, 1], (1,): [1, 1, 1, 1], (2,): [1, 1, 1, 1]})
    search = case(n=5, beam_width=5, max_tokens=2, catalog=None)
    ranked = Oracle(source, lambda _: pytest.fail("no catalog")).rank(search)
    assert [h.token_ids for h in ranked] == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


def test_a_narrow_beam_prunes_by_the_sum_so_far() -> None:
    """The best pair lies behind the third-best first token, which a beam of two drops."""
    table = {(): [5, 4, 3, 1], (2,): [997, 1, 1, 1]}
    search = case(n=2, beam_width=2, max_tokens=2, catalog=None)
    ranked = Oracle(Scripted(4, table), lambda _: pytest.fail("no catalog")).rank(search)
    assert {h.token_ids[0] for h in ranked} == {0}
    wide = Oracle(Scripted(4, table), lambda _: pytest.fail("no catalog")).rank(replace(search, beam_width=3))
    assert wide[0].token_ids == (2, 0)


def test_log_softmax_is_torchs() -> None:
    logits = np.random.default_rng(0).normal(scale=30, size=(3, 8))
    expected = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    np.testing.assert_allclose(log_softmax(logits, None), expected, atol=1e-12)


def observed(oracle: Oracle, search: SearchCase, *sequences: Tokens) -> RankedList:
    return tuple(oracle.score(search, tokens) for tokens in sequences)


def test_a_list_of_the_search_itself_is_explained_without_a_gap() -> None:
    oracle = Oracle(Seeded(3), lambda _: Grammar(set(product(range(3), range(2), range(3))), VOCABULARY))
    search = case(n=4, beam_width=4)
    explanation = explain(oracle, search, oracle.rank(search), BAND)
    assert (explanation.holds, explanation.gap) == (True, 0.0)


@pytest.mark.parametrize(("lead", "holds"), [(1e-6, True), (4e-5, True), (6e-5, False), (1e-2, False)])
def test_two_neighbours_may_change_places_only_within_the_band(lead: float, holds: bool) -> None:
    oracle = Oracle(Scripted(3, {(): [math.exp(lead), 1.0, 0.1]}), lambda _: pytest.fail("no catalog"))
    search = case(n=2, beam_width=2, max_tokens=1, catalog=None)
    explanation = explain(oracle, search, observed(oracle, search, (1,), (0,)), BAND)
    assert explanation.holds is holds
    assert explanation.gap == pytest.approx(lead, rel=1e-6)


@pytest.mark.parametrize(("lead", "holds"), [(1e-6, True), (6e-5, False)])
def test_a_prefix_pruned_in_a_near_tie_may_change_all_that_follows(lead: float, holds: bool) -> None:
    """Tokens 1 and 2 tie for the second place; the items behind them score far apart."""
    table = {(): [5.0, math.exp(lead), 1.0, 0.1], (0,): [1, 1, 1, 97], (1,): [9, 1, 1, 1], (2,): [2, 3, 4, 3]}
    oracle = Oracle(Scripted(4, table), lambda _: pytest.fail("no catalog"))
    search = case(n=2, beam_width=2, max_tokens=2, catalog=None)
    assert [h.token_ids for h in oracle.rank(search)] == [(0, 3), (1, 0)]
    explanation = explain(oracle, search, observed(oracle, search, (0, 3), (2, 2)), BAND)
    assert explanation.holds is holds


def test_a_list_that_no_search_returns_is_not_explained() -> None:
    oracle = Oracle(Scripted(3, {(): [5.0, 3.0, 1.0]}), lambda _: pytest.fail("no catalog"))
    search = case(n=2, beam_width=2, max_tokens=1, catalog=None)
    for sequences in ([(0,), (2,)], [(0,)], [(0,), (0,)]):
        assert not explain(oracle, search, observed(oracle, search, *sequences), BAND).holds


def test_scoring_given_tokens_repeats_the_search() -> None:
    grammar = Grammar(set(product(range(3), range(2), range(3))), VOCABULARY, score_end=True)
    oracle = Oracle(Seeded(5), lambda _: grammar)
    search = case(n=6, beam_width=6, space=ScoreSpace.SID, score_end=True, length_penalty=0.5)
    for hypothesis in oracle.rank(search):
        again = oracle.score(search, hypothesis.token_ids)
        assert again == Hypothesis(
            hypothesis.token_ids, pytest.approx(hypothesis.cumulative), pytest.approx(hypothesis.score)
        )


@pytest.mark.parametrize("space", list(ScoreSpace))
def test_what_no_catalog_has_is_impossible(space: ScoreSpace) -> None:
    """A list with such a hypothesis must be judged, not end the suite: in the place of a code stands one of another
    level, behind which the catalog has nothing."""
    oracle = Oracle(Seeded(3), lambda _: Grammar({(0, 0, 0), (1, 1, 2)}, VOCABULARY))
    good, bad = oracle.scores(case(space=space), [(7, 1, 4, 9), (1, 7, 4, 9)])
    assert math.isfinite(good.score)
    if space is ScoreSpace.CHILDREN:
        assert (bad.cumulative, bad.score) == (-math.inf, -math.inf)
    else:
        assert math.isfinite(bad.score), "the other spaces are normalised over more than the children"
