"""Exact ties: a head whose rows come in equal pairs makes every score occur twice (SPEC B2)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashrec.request import ScoreSpace
from flashrec_harness.parity.cases import catalog_cases
from flashrec_harness.parity.compare import Agreement
from flashrec_harness.parity.comparison import Comparison
from flashrec_harness.parity.ground import Ground
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.references.logits import Float64Logits
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.types import SearchCase


@pytest.fixture(scope="module")
def tied(edge: Ground, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """The edge checkpoint with codes 2i and 2i + 1 of each level alike, in the head and as inputs."""
    model_path = Path(shutil.copytree(edge.model_path, tmp_path_factory.mktemp("tied") / "model"))
    weights = load_file(model_path / "model.safetensors")
    codebooks = torch.tensor(edge.catalogs["5 levels"].vocabulary.codebooks)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        weights[name][codebooks[:, 1::2]] = weights[name][codebooks[:, 0::2]]
    save_file(weights, model_path / "model.safetensors", metadata={"format": "pt"})
    return replace(edge, model_path=model_path, _grammars={})


@pytest.mark.parametrize("space", list(ScoreSpace))
def test_ties_go_to_the_lower_parent_rank_and_then_to_the_lower_token(tied: Ground, space: ScoreSpace) -> None:
    """Without a near-tie allowance: the order among equal scores must be the stated one."""
    cases = [case for catalog in ("2 levels", "3 levels") for case in catalog_cases(tied, space, 6, 2, catalog=catalog)]
    oracle = Oracle(Float64Logits(tied.model_path), tied.grammar_of)
    expected = oracle.search(cases)
    assert sum(len({h.score for h in ranked}) < len(ranked) for ranked in expected) >= len(cases) // 2
    comparison = Comparison.of("ties", cases, EngineSubject(tied).search(cases), expected, explain=None)
    assert [verdict.reason for verdict in comparison.verdicts if verdict.agreement is not Agreement.EQUAL] == []


def test_ties_without_a_catalog_follow_the_same_order(tied: Ground) -> None:
    begin = tied.catalogs["5 levels"].vocabulary.begin
    assert begin is not None
    cases = [
        SearchCase(name=f"free-{n}-{steps}", prompt=(*prompt, begin), n=n, beam_width=n, max_tokens=steps)
        for prompt in tied.prompts[:3]
        for n, steps in ((4, 1), (7, 3), (16, 2))
    ]
    expected = Oracle(Float64Logits(tied.model_path), tied.grammar_of).search(cases)
    comparison = Comparison.of("ties", cases, EngineSubject(tied).search(cases), expected, explain=None)
    assert [verdict.reason for verdict in comparison.verdicts if verdict.agreement is not Agreement.EQUAL] == []
