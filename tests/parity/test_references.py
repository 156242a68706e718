"""The oracle against transformers; the suite itself compares SGLang with both, live."""

from __future__ import annotations

import pytest
import torch

from flashrec.request import ScoreSpace
from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.cases import catalog_cases, stop_cases
from flashrec_harness.parity.comparison import Comparison
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.logits import Float64Logits, load_transformers_model, parameter_count
from flashrec_harness.references.oracle import Oracle, explain


def assert_agree(comparison: Comparison) -> None:
    outcome, reason = comparison.outcome()
    assert outcome is Outcome.PASS, reason


def test_the_oracle_knows_transformers_rules_for_stop_tokens(
    edge: Ground, edge_oracle: Oracle, edge_transformers: TransformersReference
) -> None:
    cases = stop_cases(edge, 40, seed=7)
    ours, theirs = edge_oracle.search(cases), edge_transformers.search(cases)
    assert_agree(Comparison.of("oracle", cases, ours, theirs, lambda *list_: explain(edge_oracle, *list_)))
    answered = zip(cases, theirs, strict=True)
    ended = [case for case, ranked in answered if any(len(h.token_ids) < case.max_tokens for h in ranked)]
    assert len(ended) >= 15, "stop tokens were hardly ever reached"


@pytest.mark.parametrize("space", [ScoreSpace.VOCAB, ScoreSpace.CHILDREN])
@pytest.mark.parametrize("score_end", [False, True])
def test_the_oracle_masks_as_transformers_does(
    edge: Ground, edge_oracle: Oracle, edge_transformers: TransformersReference, space: ScoreSpace, score_end: bool
) -> None:
    cases = [
        case
        for catalog in edge.catalogs
        for case in catalog_cases(edge, space, 2, 5, catalog=catalog, filtered=True, score_end=score_end)
    ]
    ours, theirs = edge_oracle.search(cases), edge_transformers.search(cases)
    assert_agree(Comparison.of("oracle", cases, ours, theirs, lambda *list_: explain(edge_oracle, *list_)))


def test_float64_logits_are_those_of_the_plain_model_to_float32_precision(edge: Ground) -> None:
    prompt, prefixes = edge.prompts[0], [(3, 1), (99, 7), (3, 1)]
    ours = Float64Logits(edge.model_path).next_logits(prompt, prefixes)
    model = load_transformers_model(edge.model_path, torch.float32)
    for row, prefix in zip(ours, prefixes, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *prefix]])).logits[0, -1]
        torch.testing.assert_close(torch.from_numpy(row).float(), expected, atol=1e-4, rtol=1e-4)
    assert ours.dtype == "float64"


def test_float64_logits_do_not_depend_on_what_was_asked_before(edge: Ground) -> None:
    """The memory of earlier prefixes must not leak between prompts."""
    first, second = edge.prompts[:2]
    fresh = Float64Logits(edge.model_path).next_logits(second, [(5,)])
    used = Float64Logits(edge.model_path)
    used.next_logits(second, [()])
    used.next_logits(first, [(5,), (6,)])
    assert abs(used.next_logits(second, [(5,)]) - fresh).max() < 1e-10


def test_parameters_are_counted_from_the_headers(edge: Ground) -> None:
    model = load_transformers_model(edge.model_path, torch.float32)
    assert parameter_count(edge.model_path) == sum(weight.numel() for weight in model.parameters())
