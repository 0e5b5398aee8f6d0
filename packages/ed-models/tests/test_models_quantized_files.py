"""Quantized models and files: quantized during loading, written and read back to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.quantization.model import quantized_matrices
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.checkpoints import filling
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.conformance import TINY
from ed_models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.phi3 import Phi3Config, Phi3ForCausalLM
from ed_models.families.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from flax import nnx

from tests.conformance import cases

ONE, EIGHT = (1, 1, 1, 1, 1), (1, 2, 2, 2, 1)
SMALL = {**TINY, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
EVERYTHING = ""  # a pattern that every module has: the head and the embedding too

#: One argument of `quantize` for each format and option.
FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"dtype": "nf4"},
    "nf4 twice": {"dtype": "nf4", "double_quantization": True, "group_size": 32},
    "int8": {"dtype": "int8"},
    "int8 in groups": {"dtype": "int8", "group_size": 16},
    "int4": {"dtype": "int4", "group_size": 32},
    "fp8": {"dtype": "fp8"},
    "mxfp8": {"dtype": "mxfp8"},
    "mxfp4": {"dtype": "mxfp4"},
    "w8a8": {"dtype": "w8a8"},
    "w4a8": {"dtype": "w4a8"},
}


def llama(**fields: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM.create(
        LlamaConfig(**{**SMALL, **fields}, sharding_axis_dims=ONE), seed=0
    )


def load(folder: Path, dims: tuple[int, ...] = ONE, **options: Any) -> Any:
    return AutoEasyDeLModelForCausalLM.from_pretrained(folder, sharding_axis_dims=dims, **options)


def assert_same(ours: nnx.Module, expected: nnx.Module) -> None:
    """Assert that all arrays are equal to the bit and belong to the same parameters."""
    a, b = (dict(nnx.to_flat_state(nnx.state(m))) for m in (ours, expected))
    assert a.keys() == b.keys()
    for path, variable in a.items():
        other = b[path]
        assert type(variable) is type(other), path
        assert jax.tree.structure(variable.get_value()) == jax.tree.structure(other.get_value())
        for x, y in zip(jax.tree.leaves(variable), jax.tree.leaves(other), strict=True):
            assert x.dtype == y.dtype
            bits = f"u{x.dtype.itemsize}"
            same = np.array_equal(np.asarray(x).view(bits), np.asarray(y).view(bits))
            assert same, path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "llama"
    llama().save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_quantize_on_load_equals_quantize_after_load(
    name: str, plain: Path, tmp_path: Path
) -> None:
    spec = EasyDeLQuantizationConfig(**FORMATS[name], pattern=EVERYTHING)
    expected = llama().quantize(spec)
    model = load(plain, quantization_config=spec, apply_quantization=True)
    assert_same(model, expected)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", EIGHT)
    assert_same(again, expected)
    settings = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert settings["quantization_config"]["quant_method"] == "easydel"
    assert settings["dtype"] == "float32"


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [EIGHT, (8, 1, 1, 1, 1)])
def test_quantize_on_load_on_mesh_equals_single_device(dims: tuple[int, ...], plain: Path) -> None:
    spec = {"dtype": "nf4", "group_size": 32}
    model = load(plain, dims, quantization_config=spec, apply_quantization=True)
    assert_same(model, load(plain).quantize(spec))
    quantized = load(plain, dims).quantize(spec)
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(nnx.state(model)), nnx.to_flat_state(nnx.state(quantized)), strict=True
    ):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.sharding == y.sharding, path


@pytest.mark.nightly
@pytest.mark.parametrize("scan_layers", [True, False])
def test_scanned_and_unrolled_have_the_same_files(
    scan_layers: bool, plain: Path, tmp_path: Path
) -> None:
    spec, fields = {"dtype": "int4"}, {"scan_layers": scan_layers}
    model = load(plain, quantization_config=spec, apply_quantization=True, config_kwargs=fields)
    model.save_pretrained(tmp_path)
    other = load(tmp_path, config_kwargs={"scan_layers": not scan_layers})
    assert_same(other, load(plain, config_kwargs={"scan_layers": not scan_layers}).quantize(spec))


def rules_of_layers() -> list[tuple[str, dict[str, Any] | None]]:
    return [
        (r"layers\.1\.", {"dtype": "int8"}),
        (r"q_proj|up_proj", {"dtype": "nf4"}),
        (r"embed_tokens", {"dtype": "int4"}),
        (r"o_proj", None),
    ]


@pytest.mark.nightly
def test_rules_that_tell_layers_apart(plain: Path, tmp_path: Path) -> None:
    rules = rules_of_layers()
    expected = load(plain).quantize(rules)
    model = load(plain, quantization_config=rules, apply_quantization=True)
    assert_same(model, expected)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load(tmp_path, EIGHT), expected)


def experts() -> nnx.Module:
    fields = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM.create(Qwen3MoeConfig(**fields, sharding_axis_dims=ONE), seed=0)


def fused() -> nnx.Module:
    return Phi3ForCausalLM.create(Phi3Config(**SMALL, sharding_axis_dims=ONE), seed=0)


def absorbed() -> nnx.Module:
    fields = cases.fields("deepseek_v3", "groups, yarn")
    return DeepseekV3ForCausalLM.create(DeepseekV3Config(**fields, sharding_axis_dims=ONE), seed=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (experts, {"dtype": "nf4", "group_size": 16}),
        (fused, [("q_proj|up_proj|down_proj", {"dtype": "int8"})]),
        pytest.param(absorbed, {"dtype": "w8a8"}, marks=pytest.mark.nightly),
        (lambda: llama(tie_word_embeddings=True), {"dtype": "int8", "pattern": EVERYTHING}),
        (lambda: llama(tie_word_embeddings=True), {"dtype": "nf4"}),
    ],
    ids=["experts", "part of a fused tensor", "latent attention", "tied head", "plain tied head"],
)
def test_quantized_families_round_trip_through_files(make: Any, spec: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "plain")
    expected = model.quantize(spec)
    assert_same(
        load(tmp_path / "plain", quantization_config=spec, apply_quantization=True), expected
    )
    expected.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized", EIGHT)
    assert_same(again, expected)
    assert_same(load(tmp_path / "quantized").dequantize(), expected.dequantize())


@pytest.mark.nightly
def test_the_model_is_never_whole_in_memory(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed, original = [], filling._build_array

    def spy(shape: Any, *rest: Any) -> jax.Array:
        placed.append(tuple(shape))
        return original(shape, *rest)

    monkeypatch.setattr(filling, "_build_array", spy)
    load(plain, quantization_config={"dtype": "nf4"}, apply_quantization=True)
    assert placed.count((64, 96)) == 2 * 2  # gate and up of two layers, one after another
    assert (2, 64, 96) not in placed


def test_files_have_the_bytes_that_codes_have(plain: Path, tmp_path: Path) -> None:
    load(plain, quantization_config={"dtype": "nf4"}, apply_quantization=True).save_pretrained(
        tmp_path
    )
    files = TensorFiles.open(tmp_path)
    name = "model.layers.1.mlp.up_proj.kernel"
    assert (files[f"{name}.codes"].format, files[f"{name}.codes"].shape) == ("U8", (32, 96))
    assert (files[f"{name}.scale"].format, files[f"{name}.scale"].shape) == ("F32", (1, 96))
    assert "model.layers.1.mlp.up_proj.weight" not in files
    assert files["lm_head.weight"].format == "F32"


@pytest.mark.nightly
def test_codes_keep_their_dtype_where_the_rest_is_converted(plain: Path, tmp_path: Path) -> None:
    model = load(plain, quantization_config={"dtype": "int8"}, apply_quantization=True)
    model.save_pretrained(tmp_path, dtype="bfloat16")
    files = TensorFiles.open(tmp_path)
    assert files["lm_head.weight"].format == "BF16"
    assert files["model.layers.0.mlp.up_proj.kernel.scale"].format == "F32"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = load(tmp_path, param_dtype="bfloat16", dtype="bfloat16")
    matrices = [m for _, m in quantized_matrices(again)]
    assert {m.dtype for m in matrices} == {np.dtype(ml_dtypes.bfloat16)}


@pytest.mark.nightly
def test_a_head_of_its_own_that_is_called_tied(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    spec = {"dtype": "int8", "pattern": EVERYTHING}
    model = load(tmp_path, quantization_config=spec, apply_quantization=True)
    assert_same(model, load(plain).quantize(spec))


@pytest.mark.nightly
def test_quantization_config_alone_does_not_quantize(plain: Path) -> None:
    model = load(plain, quantization_config={"dtype": "nf4"})
    assert not model.is_quantized
    assert model.config.quantization_config == EasyDeLQuantizationConfig("nf4")
    assert_same(model.quantize(), load(plain).quantize({"dtype": "nf4"}))
    applied = load(plain, config_kwargs={"bits": 8}, apply_quantization=True)
    assert_same(applied, load(plain).quantize({"dtype": "int8"}))


@pytest.mark.nightly
def test_invalid_quantized_files_raise_error(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apply_quantization=True without a quantization_config"):
        load(plain, apply_quantization=True)
    with pytest.raises(ConfigError, match="q_prj"):
        load(plain, quantization_config=[("q_prj", {"dtype": "nf4"})], apply_quantization=True)
    with pytest.raises(ConfigError, match="does not divide"):
        load(
            plain,
            quantization_config={"dtype": "nf4", "group_size": 48},
            apply_quantization=True,
        )
    load(plain, quantization_config={"dtype": "int8"}, apply_quantization=True).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="codes cannot be quantized again"):
        load(tmp_path, quantization_config={"dtype": "nf4"}, apply_quantization=True)
    config = json.loads((tmp_path / "config.json").read_text())

    def damaged(rules: object) -> None:
        config["quantization_config"]["rules"] = rules
        (tmp_path / "config.json").write_text(json.dumps(config))

    rules = config["quantization_config"]["rules"]
    damaged([[pattern, fields | {"group_size": 16}] for pattern, fields in rules])
    with pytest.raises(CheckpointError, match=r"kernel.scale: the file has \[1, 64\]"):
        load(tmp_path)
    for wrong in (None, [], [["x"]], [["x", {"dtype": "nf5"}]], [["(", {"dtype": "nf4"}]]):
        damaged(wrong)
        with pytest.raises(CheckpointError, match="rule"):
            load(tmp_path)


@pytest.mark.daily("False")
@pytest.mark.parametrize("scan_layers", [True, False])
def test_simulated_quantization_on_load_equals_quantize(
    scan_layers: bool, plain: Path, tmp_path: Path
) -> None:
    spec, fields = {"dtype": "nf4", "simulate": True}, {"scan_layers": scan_layers}
    model = load(plain, quantization_config=spec, apply_quantization=True, config_kwargs=fields)
    assert_same(model, load(plain, config_kwargs=fields).quantize(spec))
    model.save_pretrained(tmp_path)  # the trainable parameters, unchanged
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same(load(tmp_path), load(plain, config_kwargs=fields))


def test_to_torch_rejects_quantized_model(plain: Path) -> None:
    model = load(plain, quantization_config={"dtype": "int8"}, apply_quantization=True)
    with pytest.raises(ConfigError, match="call dequantize first"):
        model.to_torch()


@pytest.mark.nightly
def test_values_are_those_of_the_parameters_dtype(plain: Path) -> None:
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    spec = {"dtype": "nf4"}
    model = load(plain, quantization_config=spec, apply_quantization=True, **options)
    assert_same(model, load(plain, **options).quantize(spec))
