"""FP8 is judged by references with the engine's dequantised weights, and by its own measured error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashrec.errors import CheckpointError
from flashrec.layers import linear
from flashrec.request import ScoreSpace
from flashrec_harness.checkpoints.fp8 import quantized_copy
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.parity import plan, suite
from flashrec_harness.parity.answers import asked
from flashrec_harness.parity.cases import catalog_cases
from flashrec_harness.parity.ground import Ground, context_ground
from flashrec_harness.parity.plan import Group, Reference
from flashrec_harness.parity.precision import fp8_error
from flashrec_harness.parity.subjects import EngineSubject
from flashrec_harness.parity.verdicts import Bench, judge_subject, yardstick_cases
from flashrec_harness.perf.worker import Task, measure
from flashrec_harness.perf.workload import from_json
from flashrec_harness.references.dequantized import dequantized_copy
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.logits import Float64Logits, fp8_activations, load_transformers_model
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.types import SearchCase, Tokens
from flashrec_harness.targets import resolve_catalog, resolve_model

PROJECTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def shop() -> Ground:
    model_path = resolve_model(None)
    return context_ground(SuiteContext(model_path=model_path, sid_vocab_file=resolve_catalog(model_path, None)))


@pytest.fixture(scope="module")
def fp8_path(shop: Ground, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_copy(shop.model_path, tmp_path_factory.mktemp("fp8") / "shop")


@pytest.fixture(scope="module")
def bench(shop: Ground, fp8_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Catalog searches on the quantised bundled checkpoint, with what ``transformers`` and the oracle answer."""
    ground = replace(shop, model_path=fp8_path)
    cases = tuple(catalog_cases(ground, ScoreSpace.CHILDREN, 13, seed=3))
    group = Group("catalog", ScoreSpace.CHILDREN, cases, (Reference.ORACLE, Reference.TRANSFORMERS))
    oracle = Oracle(Float64Logits(fp8_path), ground.grammar_of)
    answers = {
        Reference.ORACLE: asked(oracle, cases),
        Reference.TRANSFORMERS: asked(TransformersReference(fp8_path, ground.grammar_of), cases),
    }
    return Bench(ground, [group], answers, oracle, tmp_path_factory.mktemp("bench"))


def judge(bench: Bench, ground: Ground, **config: Any) -> list[Check]:
    subject = EngineSubject(ground, invariance_check=False, **config)
    assert subject.fp8
    return judge_subject(bench, subject, asked(subject, bench.groups[0].cases))


def test_the_reference_has_the_codes_times_their_scales(fp8_path: Path) -> None:
    model = load_transformers_model(fp8_path, torch.float64)
    with safe_open(fp8_path / "model.safetensors", framework="pt") as tensors:
        codes, scale = tensors.get_tensor(PROJECTION), tensors.get_tensor(f"{PROJECTION}_scale")
        norm = tensors.get_tensor("model.norm.weight")
    expected = codes.to(torch.float64) * scale.to(torch.float64)
    weight = model.get_parameter(PROJECTION)
    torch.testing.assert_close(weight, expected, rtol=2.0**-24, atol=0.0)
    assert torch.equal(model.get_parameter("model.norm.weight"), norm.double())
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("form", ["vector", "one", "scalar", "inverse"])
def test_every_form_of_scale_that_the_engine_takes_is_read(form: str, tmp_path: Path) -> None:
    codes = torch.tensor([[1.0, -2.0], [448.0, 0.5]]).to(torch.float8_e4m3fn)
    scale = {"vector": [0.5, 0.25], "one": [0.5], "scalar": 0.5, "inverse": [[0.5], [0.25]]}[form]
    name = "a_proj.weight_scale_inv" if form == "inverse" else "a_proj.weight_scale"
    tensors = {"a_proj.weight": codes, name: torch.tensor(scale), "a_proj.input_scale": torch.ones(1)}
    make_checkpoint(tmp_path / "fp8", tensors)
    found = load_file(dequantized_copy(tmp_path / "fp8", tmp_path / "plain") / "model.safetensors")
    second = [224.0, 0.25] if form in ("one", "scalar") else [112.0, 0.125]
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a_proj.weight": [[0.5, -1.0], second]}
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_codes_without_a_scale_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "fp8", {"a_proj.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=r"a_proj\.weight is FP8 and has no a_proj\.weight_scale"):
        dequantized_copy(tmp_path / "fp8", tmp_path / "plain")


def make_checkpoint(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    save_file(tensors, path / "model.safetensors")


def test_activations_go_through_three_mantissa_bits_and_one_scale_a_token() -> None:
    """448 is the largest code: rows of that size keep their scale of 1, and 17 is no e4m3 number."""
    model = torch.nn.ModuleDict(
        {"up_proj": torch.nn.Linear(3, 3, bias=False), "head": torch.nn.Linear(3, 3, bias=False)}
    )
    for layer in model.values():
        torch.nn.init.eye_(layer.weight)
    rows = torch.tensor([[448.0, 17.0, 1.0], [44.8, 1.7, 0.1]])
    expected = torch.tensor([[448.0, 16.0, 1.0], [44.8, 1.6, 0.1]])
    with fp8_activations(model):
        torch.testing.assert_close(model["up_proj"](rows), expected)
        assert torch.equal(model["head"](rows), rows)
    assert torch.equal(model["up_proj"](rows), rows)


def test_an_fp8_checkpoint_passes_by_its_measured_error(bench: Bench) -> None:
    checks = judge(bench, bench.ground)
    assert [check.outcome for check in checks] == [Outcome.PASS] * 2, [check.reason for check in checks]
    assert checks[0].data["worst_score_difference"] > 1e-3, "FP8 was not what ran"
    assert all("overlap" in row for row in checks[0].rows)


def test_an_engine_that_quantises_while_loading_is_judged_by_the_same_weights(bench: Bench, shop: Ground) -> None:
    checks = judge(bench, shop, quantization="fp8")
    assert [check.outcome for check in checks] == [Outcome.PASS] * 2, [check.reason for check in checks]


@pytest.mark.parametrize("fault", ["dropped", "of the next row"])
def test_a_weight_scale_fault_is_red(bench: Bench, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear._fill_scale

    def wrong(rows: torch.Tensor) -> linear.Store:
        spoil = torch.ones_like if fault == "dropped" else lambda scale: scale.roll(1, 0)
        return lambda scale: right(rows)(spoil(scale))

    monkeypatch.setattr(linear, "_fill_scale", wrong)
    assert [check.outcome for check in judge(bench, bench.ground)] == [Outcome.FAIL] * 2


def test_the_suite_gives_an_fp8_engine_references_with_its_weights(
    shop: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = tuple(catalog_cases(shop, ScoreSpace.CHILDREN, 2, seed=0))
    group = Group("catalog", ScoreSpace.CHILDREN, cases, (Reference.ORACLE, Reference.SGLANG))
    (left,) = plan.without(Reference.SGLANG, [group])
    assert left.references == (Reference.ORACLE,)
    assert plan.without(Reference.ORACLE, [replace(group, references=(Reference.ORACLE,))]) == []
    seen: list[Path] = []
    original = suite.judge

    def judge(ground: Ground, *rest: Any) -> list[Check]:
        seen.append(ground.model_path)
        assert "quantization_config" in json.loads((ground.model_path / "config.json").read_text())
        return original(ground, *rest)

    monkeypatch.setattr(suite, "judge", judge)
    (check,) = suite._judge_one(shop, lambda _: [left], suite._fp8_engine(shop), tmp_path)
    assert check.name.endswith(", FP8") or ", FP8 on " in check.name
    assert check.outcome is Outcome.PASS, check.reason
    assert seen != [shop.model_path]


def test_the_yardstick_asks_transformers_only_what_it_has(shop: Ground) -> None:
    asked_for = [case for space in ScoreSpace for case in catalog_cases(shop, space, 60, seed=0)]
    cases = yardstick_cases(asked_for)
    assert 40 <= len(cases) <= 80
    assert {case.space for case in cases} == {ScoreSpace.VOCAB, ScoreSpace.CHILDREN}
    assert {case.name.split("-")[1] for case in cases} == {str(space) for space in ScoreSpace}


def test_the_perf_yardstick_times_an_fp8_checkpoint(shop: Ground, fp8_path: Path) -> None:
    catalog = shop.catalogs["catalog"].path
    cell = {"n": 2, "concurrency": 1, "requests": 1, "max_tokens": None}
    body = {"name": "one", "processes": 2, "rounds": 2, "warmup_rounds": 0, "prompts": 1, "reference_requests": 1}
    workload = from_json(body | {"cells": [cell]})
    context = SuiteContext(model_path=fp8_path, sid_vocab_file=catalog)
    found = measure(Task.of("transformers", context, workload))
    (rounds,) = found["cells"].values()
    assert rounds["failures"] == []
    assert len(rounds["throughput"]) == 2


def test_the_fp8_yardstick_is_what_rounded_activations_cost_and_leaves_the_oracle_as_it_was(bench: Bench) -> None:
    """One step: the same logits from ``transformers`` in float64 under :func:`fp8_activations` and without."""
    (prompt,) = {case.prompt for case in bench.groups[0].cases[:1]}
    case = SearchCase(name="one", prompt=prompt, n=3, beam_width=3, max_tokens=1)
    assert bench.oracle is not None
    ranked = bench.oracle.rank(case)
    model = load_transformers_model(bench.ground.model_path, torch.float64)
    ids, tokens = torch.tensor([prompt]), [h.token_ids[0] for h in ranked]
    with torch.no_grad():
        exact = model(ids).logits[0, -1].log_softmax(-1)[tokens]
        with fp8_activations(model):
            rounded = model(ids).logits[0, -1].log_softmax(-1)[tokens]
    expected = float((rounded - exact).abs().max())
    assert expected > 1e-3
    assert fp8_error(bench.oracle, [case], [ranked]) == pytest.approx(expected, rel=1e-2)
    assert bench.oracle.scores(case, [h.token_ids for h in ranked]) == list(ranked)
    with pytest.raises(TypeError, match="no activations to round"):
        fp8_error(Oracle(Fixed(), bench.ground.grammar_of), [case], [ranked])


class Fixed:
    """Logits without a model."""

    vocab_size = 2

    def next_logits(self, prompt: Tokens, prefixes: Sequence[Tokens]) -> NDArray[np.float64]:
        return np.zeros((len(prefixes), 2))
