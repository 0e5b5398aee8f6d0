"""Packed checkpoints: the loaded numbers equal a second implementation of the unpacking."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.testing import require_torch
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.checkpoints.packed_tensors import unpack_tensors
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.checkpoints.tensor_writer import TensorSpec, write_tensors
from ed_models.conformance import TINY
from ed_models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from ed_models.families.gpt_oss import GptOssConfig, GptOssForCausalLM
from flax import nnx

from tests.conformance import cases

BLOCK = (16, 8)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

Tensors = dict[str, np.ndarray]


def tensors_of(folder: Path) -> Tensors:
    files = TensorFiles.open(folder)
    return {name: np.array(files.read(name)) for name in files}


def rewrite(source: Path, target: Path, tensors: Tensors, **changes: object) -> Path:
    """A copy of a checkpoint with other tensors and further keys of config.json."""
    target.mkdir()
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in tensors.items()}
    write_tensors(target, specs, tensors.__getitem__)
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def load(folder: Path, dims: tuple[int, ...] = (1, 1, 1, 1, 1), **options: Any) -> Any:
    return AutoEasyDeLModelForCausalLM.from_pretrained(folder, sharding_axis_dims=dims, **options)


def assert_same(ours: nnx.Module, expected: nnx.Module) -> None:
    wanted = dict(nnx.to_flat_state(nnx.state(expected)))
    for path, variable in nnx.to_flat_state(nnx.state(ours)):
        value = wanted.pop(path).get_value()
        np.testing.assert_array_equal(variable.get_value(), value, err_msg=str(path))
    assert not wanted


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny DeepSeek-V3 in float8 with scales of blocks, and the same numbers in float32."""
    folder = tmp_path_factory.mktemp("fp8")
    fields = cases.fields("deepseek_v3", "groups, yarn")
    config = DeepseekV3Config(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    DeepseekV3ForCausalLM.create(config, seed=0).save_pretrained(folder / "made")
    packed, plain = {}, {}
    for name, value in tensors_of(folder / "made").items():
        packed[name] = plain[name] = value
        kept = ("embed_tokens", "lm_head", "layernorm", "norm", "mlp.gate.")
        if value.ndim != 2 or any(part in name for part in kept):
            continue
        grid = [math.ceil(n / b) for n, b in zip(value.shape, BLOCK, strict=True)]
        scales = np.zeros(grid, np.float32)
        codes = np.zeros(value.shape, ml_dtypes.float8_e4m3fn)
        numbers = np.zeros_like(value)
        for i, j in np.ndindex(*grid):
            at = np.s_[i * BLOCK[0] : (i + 1) * BLOCK[0], j * BLOCK[1] : (j + 1) * BLOCK[1]]
            scales[i, j] = np.abs(value[at]).max() / 448
            codes[at] = (value[at] / scales[i, j]).astype(ml_dtypes.float8_e4m3fn)
            numbers[at] = codes[at].astype(np.float32) * scales[i, j]
        packed |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = numbers
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    return SimpleNamespace(
        packed=rewrite(folder / "made", folder / "packed", packed, quantization_config=settings),
        plain=rewrite(folder / "made", folder / "plain", plain),
        tensors=packed,
    )


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny gpt-oss whose experts are MXFP4, and the same numbers in float32."""
    folder, rng = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(0)
    fields = {**TINY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = GptOssConfig(**fields, num_local_experts=4, sharding_axis_dims=(1, 1, 1, 1, 1))
    GptOssForCausalLM.create(config, seed=0).save_pretrained(folder / "made")
    packed, plain = {}, {}
    for name, value in tensors_of(folder / "made").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = plain[name] = value
            continue
        e, i, o = value.shape
        blocks = rng.integers(0, 256, (e, o, i // 32, 16), np.uint8)
        scales = rng.integers(118, 126, (e, o, i // 32), np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = np.zeros((e, i, o), np.float32)
        for at in np.ndindex(*blocks.shape):
            x, y, block, byte = at
            for half in range(2):
                code = int(blocks[at]) >> 4 * half & 15
                number = (-1) ** (code >> 3) * E2M1[code & 7] * 2.0 ** (int(scales[at[:3]]) - 127)
                numbers[x, 32 * block + 2 * byte + half, y] = number
        plain[name] = numbers
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return SimpleNamespace(
        packed=rewrite(folder / "made", folder / "packed", packed, quantization_config=settings),
        plain=rewrite(folder / "made", folder / "plain", plain),
        tensors=packed,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [(1, 1, 1, 1, 1), (1, 2, 2, 2, 1)], ids=["one", "eight"])
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_loads_as_the_same_numbers_in_float32_would(
    kind: str, dims: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue(kind)
    model = load(made.packed, dims)
    assert_same(model, load(made.plain, dims))
    assert model.config.quantization_config is None


@pytest.mark.nightly
def test_values_are_rounded_once_to_the_dtype_of_the_parameters(fp8: SimpleNamespace) -> None:
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    assert_same(load(fp8.packed, **options), load(fp8.plain, **options))


@pytest.mark.nightly
def test_saved_model_is_not_packed(mxfp4: SimpleNamespace, tmp_path: Path) -> None:
    model = load(mxfp4.packed)
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same(load(tmp_path), model)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("fp8", "model.layers.1.self_attn.q_b_proj.weight"),
        ("mxfp4", "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_a_slice_is_the_slice_of_the_whole(
    kind: str, name: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind).packed
    config = SimpleNamespace(
        quantization_config=json.loads((folder / "config.json").read_text())["quantization_config"],
        replace=lambda **changes: None,
    )
    files, _ = unpack_tensors(TensorFiles.open(folder), config)  # type: ignore[arg-type]
    whole = files.read(name)
    assert whole.shape == files[name].shape
    for index in np.random.default_rng(0).integers(0, 40, (20, whole.ndim, 2)):
        at = tuple(slice(int(a), int(a + b), 1 + int(b) % 3) for a, b in index)
        np.testing.assert_array_equal(files.read(name, at), whole[at])
    np.testing.assert_array_equal(files.read(name, (1,)), whole[1])
    assert not [other for other in files if other.endswith(("_scale_inv", "_blocks", "_scales"))]


@pytest.mark.nightly
def test_one_scale_for_a_tensor_and_scales_that_are_exponents(
    fp8: SimpleNamespace, tmp_path: Path
) -> None:
    up, gate = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "gate"))
    plain = tensors_of(fp8.plain)
    packed = dict(plain)
    # The byte 130 is the exponent 3.
    for name, scale, factor in (
        (up, np.array(0.37, np.float32), np.float32(0.37)),
        (gate, np.array([130], np.uint8), 8),
    ):
        packed |= {name: fp8.tensors[name], f"{name}_scale_inv": scale}
        plain[name] = fp8.tensors[name].astype(np.float32) * factor
    packed["model.layers.0.mlp.up_proj.activation_scale"] = np.array(1.0, np.float32)
    settings = {"quant_method": "fp8", "weight_block_size": None}
    folder = rewrite(fp8.plain, tmp_path / "packed", packed, quantization_config=settings)
    assert_same(load(folder), load(rewrite(fp8.plain, tmp_path / "plain", plain)))


@pytest.mark.nightly
@pytest.mark.torch
def test_unpacked_tensors_match_transformers(fp8: SimpleNamespace, mxfp4: SimpleNamespace) -> None:
    torch = require_torch()
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    name = "model.layers.0.mlp.experts.down_proj"
    parts = [torch.tensor(mxfp4.tensors[f"{name}_{part}"]) for part in ("blocks", "scales")]
    theirs = _convert_moe_packed_tensors(*parts, dtype=torch.float32)
    np.testing.assert_array_equal(TensorFiles.open(mxfp4.plain).read(name), theirs.numpy())

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    # The reference implementation needs blocks that divide the matrix.
    whole = [
        n.removesuffix("_scale_inv")
        for n in fp8.tensors
        if n.endswith("_scale_inv")
        and not any(np.mod(fp8.tensors[n.removesuffix("_scale_inv")].shape, BLOCK))
    ]
    assert whole
    for name in whole:
        codes = torch.tensor(fp8.tensors[name].view(np.uint8)).view(torch.float8_e4m3fn)
        scales = torch.tensor(fp8.tensors[f"{name}_scale_inv"])
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales)
        np.testing.assert_array_equal(TensorFiles.open(fp8.plain).read(name), theirs.numpy())


def broken(kind: str, made: SimpleNamespace, folder: Path) -> tuple[Path, str]:
    """A checkpoint with a mistake, and the error message."""
    tensors, settings = dict(made.tensors), {"quant_method": "fp8", "weight_block_size": [16, 8]}
    name = "model.layers.0.self_attn.o_proj.weight"
    if kind == "another method":
        settings, message = {"quant_method": "hqq"}, r"'hqq'.*known: awq, .*, mxfp4"
    elif kind == "another method, nearly":
        settings, message = {"quant_method": "mxfp8"}, "did you mean"
    elif kind == "no scale":
        del tensors[f"{name}_scale_inv"]
        message = "float8 without a scale"
    elif kind == "no codes":
        del tensors[name]
        message = "which is not in the checkpoint"
    else:
        tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
        message = r"blocks of \[16, 8\]"
    return rewrite(made.plain, folder, tensors, quantization_config=settings), message


@pytest.mark.parametrize(
    "kind", ["another method", "another method, nearly", "no scale", "no codes", "another grid"]
)
@pytest.mark.daily("no scale")
def test_invalid_packed_checkpoint_raises_checkpoint_error(
    kind: str, fp8: SimpleNamespace, tmp_path: Path
) -> None:
    folder, message = broken(kind, fp8, tmp_path / "broken")
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.nightly
def test_mxfp4_without_scales_raises_checkpoint_error(
    mxfp4: SimpleNamespace, tmp_path: Path
) -> None:
    tensors = dict(mxfp4.tensors)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    settings = {"quant_method": "mxfp4"}
    folder = rewrite(mxfp4.plain, tmp_path / "broken", tensors, quantization_config=settings)
    with pytest.raises(CheckpointError, match="a scale for each"):
        load(folder)
