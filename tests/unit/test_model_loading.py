"""What a checkpoint must be, and what is said when it is not (SPEC M1 to M5, M9, M10)."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import VOCAB, Tensors, edit_config, edit_tensors, write_checkpoint
from transformers import Qwen3ForCausalLM

from flashrec import Engine, EngineConfig
from flashrec.errors import CheckpointError, ConfigError, FlashRecError, UnsupportedModelError
from flashrec.layers.rotary import RopeRung

PROMPT = (5, 9, 33, 2, 71, 40, 8, 8, 60, 17, 90, 3, 21)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def load(path: Path, **fields: Any) -> Engine:
    return Engine(EngineConfig(model_path=path, device="cpu", invariance_check=False, **fields))


def scores(engine: Engine) -> list[tuple[tuple[int, ...], float]]:
    (result,) = engine.generate([PROMPT], n=6, max_tokens=3, ignore_eos=True)
    return [(beam.token_ids, beam.cumulative_logprob) for beam in result.beams]


def hugging_face_scores(path: Path) -> list[tuple[tuple[int, ...], float]]:
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, num_beams=6, num_return_sequences=6, max_new_tokens=3, do_sample=False, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True, length_penalty=0.0,
    )  # fmt: skip
    rows = (tuple(row[len(PROMPT) :].tolist()) for row in out.sequences)
    return list(zip(rows, out.sequences_scores.tolist(), strict=True))


def assert_same(found: list[tuple[tuple[int, ...], float]], wanted: list[tuple[tuple[int, ...], float]]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted], abs=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_equals_transformers_tied_or_not(tmp_path: Path, tied: bool) -> None:
    path = write_checkpoint(tmp_path, tied=tied, seed=3)
    assert_same(scores(load(path)), hugging_face_scores(path))


def test_dimensions_come_from_the_config(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path, num_attention_heads=6, num_key_value_heads=3, head_dim=32, layers=1, rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    assert_same(scores(load(path)), hugging_face_scores(path))


@pytest.mark.parametrize(
    ("fields", "rung"),
    [
        ({}, RopeRung.FUSED),
        ({"enable_fused_qk_rope_kv": False}, RopeRung.ROPE_STORE),
        ({"enable_fused_qk_rope_kv": False, "attention_backend": "torch"}, RopeRung.PLAIN),
    ],
)
def test_each_rope_rung_gives_the_same_answer(checkpoint: Path, fields: dict[str, Any], rung: RopeRung) -> None:
    def spread(tensors: Tensors) -> None:
        """Norm weights that a rung cannot leave out unseen."""
        generator = torch.Generator().manual_seed(0)
        for name in [name for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]:
            tensors[name] = 0.5 + torch.rand(tensors[name].shape, generator=generator)

    edit_tensors(checkpoint, spread)
    engine = load(checkpoint, **fields)
    assert [layer.attention.rotary.rung for layer in engine.parts.model.layers] == [rung] * 2  # type: ignore[attr-defined]
    assert_same(scores(engine), hugging_face_scores(checkpoint))


def test_sharded_checkpoint_loads(checkpoint: Path) -> None:
    wanted = scores(load(checkpoint))
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    index = {name: file for file, part in shards.items() for name in part}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert scores(load(checkpoint)) == wanted

    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards named by the index are absent: .*b\.safetensors"):
        load(checkpoint)


def break_missing(tensors: Tensors) -> None:
    del tensors["model.layers.1.self_attn.k_proj.weight"]


def break_extra(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def break_shape(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(63, 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_missing, r"missing model\.layers\.1\.self_attn\.k_proj\.weight \[32, 32\]"),
        (break_extra, r"unexpected model\.layers\.0\.self_attn\.q_proj\.bias"),
        (break_shape, r"model\.layers\.0\.mlp\.up_proj\.weight has shape \[63, 32\], expected \[64, 32\]"),
    ],
)
def test_tensors_that_do_not_fit(checkpoint: Path, damage: Callable[[Tensors], None], message: str) -> None:
    edit_tensors(checkpoint, damage)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


def test_all_misfits_are_listed_at_once(checkpoint: Path) -> None:
    for damage in (break_missing, break_extra, break_shape):
        edit_tensors(checkpoint, damage)
    with pytest.raises(
        CheckpointError, match=r"3 tensors do not fit config\.json: missing .*; unexpected .*; .* has shape"
    ):
        load(checkpoint)


def test_tied_checkpoint_may_carry_its_head_if_equal(checkpoint: Path) -> None:
    wanted = scores(load(checkpoint))

    def add_head(tensors: Tensors, scale: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * scale

    edit_tensors(checkpoint, lambda tensors: add_head(tensors, 1.0))
    assert scores(load(checkpoint)) == wanted
    edit_tensors(checkpoint, lambda tensors: add_head(tensors, 2.0))
    with pytest.raises(CheckpointError, match=r"differs from model\.embed_tokens\.weight"):
        load(checkpoint)


EIGHT: dict[str, Any] = {"num_bits": 8, "type": "float"}


def groups(**sides: object) -> dict[str, Any]:
    """A compressed-tensors configuration as published FP8-dynamic checkpoints have it, with ``sides`` replaced."""
    group = {
        "weights": EIGHT | {"strategy": "channel", "dynamic": False},
        "input_activations": EIGHT | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group | sides}}
    return {"quantization_config": quantization}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures = \['LlamaForCausalLM'\]"),
        ({"use_sliding_window": True, "sliding_window": 128}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = \['sliding_attention'\]"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling = 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, r"rope_parameters\.rope_type = 'linear'"),
        ({"rope_parameters": {"type": "linear", "rope_theta": 1e4}}, r"rope_parameters\.rope_type = 'linear'"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"kv_lora_rank": 64}, "kv_lora_rank = 64"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "weight_block_size"),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            "activation_scheme = 'static'",
        ),
        (groups(input_activations=None), r"group_0\.input_activations\.num_bits = None"),
        (groups(input_activations=EIGHT | {"strategy": "tensor", "dynamic": False}), "strategy = 'tensor'"),
        (groups(input_activations=EIGHT | {"strategy": "token", "dynamic": False}), "dynamic = False"),
        (groups(weights=EIGHT | {"strategy": "block"}), r"group_0\.weights\.strategy = 'block'"),
        (groups(output_activations=EIGHT), "output_activations"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(checkpoint: Path, fields: dict[str, Any], message: str) -> None:
    edit_config(checkpoint, lambda config: config.update(fields))
    with pytest.raises(UnsupportedModelError, match=message):
        load(checkpoint)


def test_unused_sliding_window_is_no_obstacle(checkpoint: Path) -> None:
    wanted = scores(load(checkpoint))
    edit_config(checkpoint, lambda config: config.update(use_sliding_window=False, sliding_window=128))
    assert scores(load(checkpoint)) == wanted


def test_directories_that_are_no_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: (checkpoint / "model.safetensors").write_bytes(b"no"), "not a readable safetensors file"),
        ((checkpoint / "model.safetensors").unlink, r"neither model\.safetensors nor its index"),
        (lambda: edit_config(checkpoint, lambda config: config.pop("hidden_size")), "'hidden_size' is missing"),
        (lambda: (checkpoint / "config.json").write_text("{"), "not JSON"),
        ((checkpoint / "config.json").unlink, "no such file"),
    ]
    for damage, message in cases:
        damage()
        with pytest.raises(CheckpointError, match=message) as caught:
            load(checkpoint)
        assert "\n" not in str(caught.value)


def quantised(path: Path, scale_name: str) -> None:
    """Turn every projection of a checkpoint into per-channel FP8, as a published FP8 checkpoint stores it."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name].float()
            scale = weight.abs().amax(1, keepdim=True) / 448.0
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", scale_name)] = scale

    edit_tensors(path, change)
    edit_config(path, lambda config: config.update(quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize("scale_name", [".weight_scale", ".weight_scale_inv"])
def test_fp8_checkpoint_loads_its_own_scales(checkpoint: Path, scale_name: str) -> None:
    quantised(checkpoint, scale_name)
    engine = load(checkpoint)
    stored = load_file(checkpoint / "model.safetensors")
    qkv = engine.parts.model.layers[0].attention.qkv_proj  # type: ignore[attr-defined]
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    merged = torch.cat([stored[f"{name}.weight"].view(torch.uint8) for name in names])
    scales = torch.cat([stored[f"{name}{scale_name}"].flatten() for name in names])
    assert torch.equal(qkv.weight.view(torch.uint8), merged)
    assert torch.equal(qkv.weight_scale, scales)


def test_compressed_tensors_with_dynamic_tokens_load(checkpoint: Path) -> None:
    quantised(checkpoint, ".weight_scale")
    wanted = scores(load(checkpoint))
    edit_config(checkpoint, lambda config: config.update(groups()))
    assert scores(load(checkpoint)) == wanted


def with_kv_scales(path: Path, layers: int, *, keys: float = 0.25, values: float = 0.5) -> None:
    def add(tensors: Tensors) -> None:
        for layer in range(layers):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(keys)
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([values])

    edit_tensors(path, add)


@pytest.mark.parametrize("fp8_weights", [False, True])
def test_scales_of_an_fp8_cache_come_from_the_checkpoint(checkpoint: Path, fp8_weights: bool) -> None:
    """SPEC M12: whatever the weights are, and said."""
    if fp8_weights:
        quantised(checkpoint, ".weight_scale")
    without = load(checkpoint, kv_cache_dtype="fp8_e4m3")
    assert set(without.parts.pool.k_scale) == set(without.parts.pool.v_scale) == {1.0}
    assert without.stats()["kv_scales"] == "1.0: the checkpoint has none"
    with_kv_scales(checkpoint, layers=2)
    engine = load(checkpoint, kv_cache_dtype="fp8_e4m3")
    assert engine.parts.pool.k_scale == (0.25, 0.25)
    assert engine.parts.pool.v_scale == (0.5, 0.5)
    told = engine.stats()
    assert told["device_name"]
    assert told["device_name"] in Path("/proc/cpuinfo").read_text() + platform.processor() + platform.machine()
    assert (told["kv_cache_dtype"], told["kv_scales"]) == ("float8_e4m3fn", "from the checkpoint")
    unused = load(checkpoint).stats()
    assert (unused["kv_cache_dtype"], unused["kv_scales"]) == ("float32", "none: the cache is not FP8")


def test_scales_of_some_layers_only_are_no_scales(checkpoint: Path) -> None:
    with_kv_scales(checkpoint, layers=1)
    with pytest.raises(
        CheckpointError, match=r"missing model\.layers\.1\.self_attn\.k_scale, which other layers have; missing .*v_"
    ):
        load(checkpoint, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(checkpoint: Path, scale: float) -> None:
    with_kv_scales(checkpoint, layers=2, values=scale)
    with pytest.raises(CheckpointError, match=r"v_scale = .*expected one positive number"):
        load(checkpoint, kv_cache_dtype="fp8_e4m3")


def test_quantising_on_load_equals_the_quantised_checkpoint(checkpoint: Path) -> None:
    on_load = scores(load(checkpoint, quantization="fp8"))
    full = scores(load(checkpoint))
    quantised(checkpoint, ".weight_scale")
    assert scores(load(checkpoint)) == on_load
    assert on_load != full


def test_fp8_paths_agree_with_and_without_fused_kernels(checkpoint: Path) -> None:
    quantised(checkpoint, ".weight_scale")
    fused = scores(load(checkpoint))
    assert scores(load(checkpoint, enable_fused_rms_fp8=False, enable_fused_silu_fp8=False)) == fused


def test_fp8_weights_need_the_config_to_say_so(checkpoint: Path) -> None:
    quantised(checkpoint, ".weight_scale")
    edit_config(checkpoint, lambda config: config.pop("quantization_config"))
    with pytest.raises(
        CheckpointError, match=r"has type F8_E4M3, which config\.json's quantization_config does not say"
    ):
        load(checkpoint)


def test_a_directory_called_fp8_means_nothing(checkpoint: Path) -> None:
    renamed = checkpoint.rename(checkpoint.parent / "model-fp8")
    assert not load(renamed).parts.fp8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_rows": 8, "max_beam_width": 16}, "max_rows 8 is below max_beam_width 16"),
        ({"dtype": "float16"}, "dtype"),
        ({"page_size": 0}, "page_size"),
        ({"no_such_flag": 1}, "no_such_flag"),
        ({"kv_pool_tokens": 16, "page_size": 32}, "kv_pool_tokens"),
        ({"sid": "10:20/5,5"}, "sid: needs sid_vocab_file"),
        ({"attention_backend": "flashinfer"}, "attention_backend: flashinfer needs a CUDA device"),
    ],
)
def test_configurations_that_contradict_themselves(original: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(original, **fields)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, FlashRecError)


def test_vocabulary_of_the_fixture_is_what_the_tests_assume(original: Path) -> None:
    assert load(original).model_config.vocab_size == VOCAB


def test_types_and_scales_that_do_not_belong(checkpoint: Path) -> None:
    def damage(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 32, dtype=torch.int8)
        tensors["model.layers.0.self_attn.input_scale"] = torch.ones(())

    edit_tensors(checkpoint, damage)
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.0\.self_attn\.input_scale; .*type I8"):
        load(checkpoint)
