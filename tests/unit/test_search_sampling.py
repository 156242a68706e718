"""Sampling without replacement by stochastic beam search, against exact probabilities (SPEC B5)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_search import Ask, Codes, World, brute_force, legal_sids, search, step_log_probs

from flashrec import Beam, Engine, EngineConfig, Request, ScoreSpace
from flashrec.assets import tiny_shop
from flashrec.search import expand as expand_module
from flashrec.search.filters import LeafFilter

DRAWS = 3000
SIGNIFICANCE = 1e-3
"""The draws are seeded: a test that passes keeps passing until the sampler changes."""


@pytest.fixture(scope="module")
def world() -> World:
    return World.make([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1)], (3, 3), seed=4)


def leaf_probabilities(world: World, ask: Ask) -> dict[Codes, float]:
    """Probability of each legal SID: the product of its codes' tempered softmaxes over the legal ones."""
    allowed = legal_sids(world, ask.leaf_filter)
    out = {}
    for sid in sorted(allowed):
        log_prob = 0.0
        for level in range(len(sid)):
            logits = step_log_probs(world, ask.prompt, sid[:level], ScoreSpace.VOCAB, allowed)
            weights = {code: math.exp(value / ask.temperature) for code, value in logits.items()}
            log_prob += math.log(weights[sid[level]] / math.fsum(weights.values()))
        out[sid] = math.exp(log_prob)
    return out


def pair_probabilities(leaves: dict[Codes, float]) -> dict[tuple[Codes, Codes], float]:
    """Of drawing one SID and then, without putting it back, another."""
    return {(a, b): leaves[a] * leaves[b] / (1 - leaves[a]) for a, b in itertools.permutations(leaves, 2)}


def draw_pairs(world: World, ask: Ask, space: ScoreSpace) -> Counter[tuple[Codes, Codes]]:
    """The first two SIDs, in the order in which they were drawn, of many seeds."""
    wave = [
        Ask(ask.prompt, n=2, leaf_filter=ask.leaf_filter, temperature=ask.temperature, seed=seed)
        for seed in range(DRAWS)
    ]
    return Counter((first.codes, second.codes) for first, second in search(world, wave, space, padding=0).hits)


def p_value(counts: Counter[tuple[Codes, Codes]], wanted: dict[tuple[Codes, Codes], float]) -> float:
    """Of a chi-squared test; outcomes that are expected fewer than 5 times are put together."""
    assert set(counts) <= set(wanted)
    total = sum(counts.values())
    common = [pair for pair, share in wanted.items() if share * total >= 5]
    found = [*(counts[pair] for pair in common), total - sum(counts[pair] for pair in common)]
    expected = [*(wanted[pair] * total for pair in common), (1 - math.fsum(wanted[pair] for pair in common)) * total]
    if expected[-1] < 5:
        found, expected = found[:-1], expected[:-1]
        expected = [value * sum(found) / math.fsum(expected) for value in expected]
    return float(stats.chisquare(found, expected).pvalue)


@pytest.mark.parametrize(("temperature", "space"), [(1.0, ScoreSpace.SID), (2.0, ScoreSpace.CHILDREN)])
def test_pairs_are_drawn_without_replacement(world: World, temperature: float, space: ScoreSpace) -> None:
    ask = Ask(prompt=3, temperature=temperature)
    wanted = pair_probabilities(leaf_probabilities(world, ask))
    counts = draw_pairs(world, ask, space)
    assert p_value(counts, wanted) > SIGNIFICANCE
    colder = pair_probabilities(leaf_probabilities(world, Ask(prompt=3, temperature=temperature * 0.8)))
    assert p_value(counts, colder) < SIGNIFICANCE


def test_filters_change_what_is_drawn_from(world: World) -> None:
    ask = Ask(prompt=3, temperature=2.0, leaf_filter=LeafFilter(np.array([1, 3]), allow=False))
    wanted = pair_probabilities(leaf_probabilities(world, ask))
    assert p_value(draw_pairs(world, ask, ScoreSpace.SID), wanted) > SIGNIFICANCE


def test_equal_probabilities_of_a_square_catalog(world: World) -> None:
    """A level must not draw the noise of the level above it: the numbers of their nodes overlap."""
    square = World.make([(a, b) for a in range(2) for b in range(2)], (2, 2), seed=0, head=torch.zeros(8, 6))
    ask = Ask(temperature=1.0)
    wanted = pair_probabilities(leaf_probabilities(square, ask))
    assert list(wanted.values()) == pytest.approx([1 / 12] * 12)
    assert p_value(draw_pairs(square, ask, ScoreSpace.SID), wanted) > SIGNIFICANCE


def test_noise_that_is_not_gumbel_would_be_seen(world: World) -> None:
    ask = Ask(prompt=3, temperature=1.0)
    wanted = pair_probabilities(leaf_probabilities(world, ask))
    real = expand_module.gumbel
    with mock.patch.object(expand_module, "gumbel", lambda key: real(key) * 0.8):
        assert p_value(draw_pairs(world, ask, ScoreSpace.SID), wanted) < SIGNIFICANCE


@pytest.fixture(scope="module")
def shop() -> Engine:
    path = tiny_shop()
    return Engine(EngineConfig(model_path=path, sid_vocab_file=path / "catalog.json", device="cpu", max_context=128))


PROMPT = tuple(range(40, 75))


def sample(seed: int | None, n: int = 8, temperature: float = 1.0, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(input_ids=prompt, n=n, temperature=temperature, seed=seed)


def run(shop: Engine, *requests: Request) -> list[tuple[Beam, ...]]:
    return [result.beams for result in shop.generate(requests)]


def test_the_seed_decides(shop: Engine) -> None:
    one, again, other = (run(shop, sample(seed))[0] for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_same_bits_alone_and_among_wave_mates(shop: Engine) -> None:
    probe, greedy = sample(5), sample(None, temperature=0.0)
    (alone,), (greedy_alone,) = run(shop, probe), run(shop, greedy)
    mates = [sample(6, n=3), sample(7, n=20, temperature=2.0, prompt=PROMPT[:9])]
    before = shop.stats()["waves"]
    found = run(shop, mates[0], greedy, probe, mates[1])
    assert shop.stats()["waves"] == before + 2, "requests that sample keep to themselves"
    assert found[2] == alone
    assert found[1] == greedy_alone


def test_reported_scores_are_free_of_noise(shop: Engine) -> None:
    """A sampled SID has the score that an exhaustive search gives it, and the best come first."""
    assert shop.catalog is not None
    (drawn,) = run(shop, sample(3, n=30, temperature=1.5))
    assert len({beam.sid for beam in drawn}) == 30
    assert [beam.score for beam in drawn] == sorted((beam.score for beam in drawn), reverse=True)
    allowed = tuple(beam.sid for beam in drawn if beam.sid is not None)
    (exhaustive,) = shop.generate([PROMPT], n=30, allow_sids=allowed)
    assert {beam.sid: beam.cumulative_logprob for beam in drawn} == {
        beam.sid: beam.cumulative_logprob for beam in exhaustive.beams
    }


def test_all_legal_are_drawn_when_there_are_fewer_than_n(world: World) -> None:
    ask = Ask(prompt=3, n=10, temperature=3.0, seed=1)
    (found,) = search(world, [ask]).hits
    assert {hit.codes for hit in found} == legal_sids(world, None)
    exact = {hit.codes: hit.score for hit in brute_force(world, ask, ScoreSpace.SID).hits}
    assert {hit.codes: hit.score for hit in found} == pytest.approx(exact, abs=1e-5)
