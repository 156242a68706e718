"""Random-weight checkpoints: complete, sharded, where the vocabulary of that family puts things."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_samples import QUIET
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from flashrec.errors import ConfigError
from flashrec.sid import infer_layout, load_catalog
from flashrec_harness.checkpoints.fp8 import quantized_copy
from flashrec_harness.checkpoints.shapes import SHAPES, make_shape, random_sids, tensor_shapes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    make_shape("tiny", out, 1, catalog_sids=50, shard_bytes=200_000, console=QUIET)
    return out


def test_transformers_loads_every_tensor(tiny: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_shards_agree_with_their_index(tiny: Path) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    files = sorted(tiny.glob("*.safetensors"))
    assert len(files) > 1
    held = {name: file.name for file in files for name in load_file(file)}
    assert held == index["weight_map"]
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors)
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all((tensor != 1).any() for tensor in tensors if tensor.ndim == 1), "norms that do something"


def test_an_fp8_copy_of_shards_holds_every_tensor_where_its_index_says(tiny: Path, tmp_path: Path) -> None:
    copy = quantized_copy(tiny, tmp_path / "fp8")
    before, after = (_weight_map(directory) for directory in (tiny, copy))
    assert len(set(before.values())) > 1
    projections = {name for name in before if name.endswith("_proj.weight")}
    assert set(after) == set(before) | {f"{name}_scale" for name in projections}
    held = {file: load_file(copy / file) for file in set(after.values())}
    for name, file in after.items():
        tensor, original = held[file][name], name.removesuffix("_scale")
        if name in projections:
            weight = load_file(tiny / before[name])[name].float()
            restored = tensor.float() * held[file][f"{name}_scale"]
            assert tensor.dtype == torch.float8_e4m3fn
            # e4m3 has three bits behind the leading one: half a step is 1/16 of a value, or of the smallest normal one.
            step = weight.abs().amax(1, keepdim=True) / 448
            assert ((restored - weight).abs() <= torch.maximum(weight.abs() / 16, step * 2**-9) * 1.001).all()
        elif original == name:
            assert torch.equal(tensor, load_file(tiny / before[name])[name])


def _weight_map(directory: Path) -> dict[str, str]:
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return dict(index["weight_map"])


def test_the_seed_decides(tiny: Path, tmp_path: Path) -> None:
    for folder, seed in (("same", 1), ("other", 2)):
        make_shape("tiny", tmp_path / folder, seed, catalog_sids=50, shard_bytes=200_000, console=QUIET)
    name = "model-00001-of-00003.safetensors"
    assert (tmp_path / "same" / name).read_bytes() == (tiny / name).read_bytes()
    assert (tmp_path / "other" / name).read_bytes() != (tiny / name).read_bytes()


def test_the_catalog_fits_the_tokenizer(tiny: Path) -> None:
    layout = infer_layout(AutoTokenizer.from_pretrained(tiny))
    catalog = load_catalog(tiny / "catalog.json", layout)
    assert catalog.num_sids == catalog.num_items == 50
    assert layout.codebooks[0][0] == SHAPES["tiny"].text_tokens


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"])
def test_named_shapes_are_those_of_transformers(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Qwen3ForCausalLM(AutoConfig.for_model(**shape.model.config_json(shape.vocab_size, None)))
    expected = {key: tuple(t.shape) for key, t in model.state_dict().items() if key != "lm_head.weight"}
    assert tensor_shapes(shape.model, shape.vocab_size) == expected


def test_the_shape_of_the_speed_bars() -> None:
    shape = SHAPES["qwen3-1.7b"]
    tensors = tensor_shapes(shape.model, shape.vocab_size)
    embedding = tensors.pop("model.embed_tokens.weight")
    assert embedding == (176_640, 2_048)
    assert sum(int(np.prod(t)) for t in tensors.values()) == pytest.approx(1.409e9, rel=1e-3)
    assert shape.text_tokens + sum(shape.codebook_sizes) + 2 <= shape.vocab_size


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_random_sids_are_distinct_sorted_and_in_range(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, int(np.prod(sizes))))
    sids = random_sids(sizes, count, seed=0)
    rows = [tuple(row) for row in sids.tolist()]
    assert rows == sorted(set(rows))
    assert len(rows) == count
    assert np.all(sids < np.array(sizes))


def test_many_random_sids_of_a_large_space() -> None:
    sids = random_sids((8192, 8192, 8192), 10_000, seed=0)
    assert len(np.unique(sids, axis=0)) == len(sids) == 10_000
    assert sids.max() > 8_000


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [("qwen9", None, "--shape qwen9: unknown; one of tiny"), ("tiny", 513, "have 512 SIDs")],
)
def test_impossible_requests_are_errors(tmp_path: Path, name: str, count: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_shape(name, tmp_path, 0, catalog_sids=count, console=QUIET)
