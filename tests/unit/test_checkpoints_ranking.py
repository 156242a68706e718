"""The batched ranker against the brute-force float64 oracle, and margins against their definition."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_samples import small_shop
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashrec.request import ScoreSpace
from flashrec.sid import Catalog, SidLayout, build_trie, infer_layout, load_catalog
from flashrec_harness.checkpoints import margins as margins_module
from flashrec_harness.checkpoints.margins import case_of, margins, own_oracle, summarise
from flashrec_harness.checkpoints.ranking import CatalogRanker
from flashrec_harness.checkpoints.sequences import read_histories
from flashrec_harness.prompts import PromptBuilder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint")
    small_shop(out)
    return out


@pytest.fixture(scope="module")
def parts(checkpoint: Path) -> tuple[SidLayout, Catalog, list[tuple[int, ...]]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    layout = infer_layout(tokenizer)
    catalog = load_catalog(checkpoint / "catalog.json", layout)
    rows = read_histories(checkpoint / "test.csv")
    return layout, catalog, PromptBuilder(tokenizer, layout, catalog).prompts([row.items for row in rows])


@pytest.mark.parametrize("space", list(ScoreSpace))
@pytest.mark.parametrize("n", [3, 500])
def test_equal_to_the_oracle(
    checkpoint: Path, parts: tuple[SidLayout, Catalog, list[tuple[int, ...]]], space: ScoreSpace, n: int
) -> None:
    layout, catalog, prompts = parts
    prompts = prompts[:5]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    found = CatalogRanker(model, layout, build_trie(catalog.sids, layout.sizes), space).rank(prompts, n, batch_rows=7)
    oracle = own_oracle(checkpoint)
    for prompt, ranking in zip(prompts, found, strict=True):
        expected = oracle.rank(case_of(prompt, layout, n, space))
        # transformers computes norms in float32, the oracle in float64.
        np.testing.assert_allclose(ranking.logprobs, [h.cumulative for h in expected], atol=2e-5)
        sids = [layout.codes(h.token_ids) for h in expected]
        assert [tuple(catalog.sids[leaf].tolist()) for leaf in ranking.leaves] == sids
        assert len(ranking.leaves) == min(n, catalog.num_sids)


def test_margins_are_gaps_of_scores(checkpoint: Path, parts: tuple[SidLayout, Catalog, list[tuple[int, ...]]]) -> None:
    layout, _, prompts = parts
    sid, found = margins(checkpoint, prompts[:2], 5, spaces=[ScoreSpace.SID, ScoreSpace.CHILDREN])
    assert (sid.space, found.space) == ("sid", "children")
    oracle = own_oracle(checkpoint)
    gaps = []
    for prompt in prompts[:2]:
        scores = [h.cumulative / 4 for h in oracle.rank(case_of(prompt, layout, 5, ScoreSpace.CHILDREN))]
        gaps += [better - worse for better, worse in itertools.pairwise(scores)]
    assert found.gaps == len(gaps) == 8
    assert found.median_gap == pytest.approx(np.median(gaps))


def test_too_narrow_margins_show() -> None:
    """Negative control: near-ties are reported as insufficient, in either figure."""
    good = summarise(ScoreSpace.SID, [np.arange(0.0, -10.0, -0.02)])
    narrow = summarise(ScoreSpace.SID, [np.arange(0.0, -5.0, -0.009)])
    tied = summarise(ScoreSpace.SID, [np.repeat(np.arange(0.0, -10.0, -0.02), [2] + [1] * 499)] * 3 + [np.zeros(9)])
    assert good.sufficient
    assert not narrow.sufficient
    assert tied.median_gap >= margins_module.MIN_MEDIAN_GAP
    assert not tied.sufficient
