"""Models that keep the codes of a GGUF file have the values of its decoded tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_layers.quantization import describe
from ed_models import AutoEasyDeLConfig, AutoEasyDeLModelForCausalLM
from ed_models.checkpoints.gguf import codes
from ed_models.checkpoints.gguf.blocks import map_file, raw_blocks
from ed_models.checkpoints.gguf.header import read_gguf_header
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.saving import layer_values
from flax import nnx
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
#: Bytes of a block where its float16 numbers are.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},  # rows of queries and keys in another order
    "phi3": {"pad_token_id": 0},  # several matrices in one tensor
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}


def random_blocks(form: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return blocks with random codes and finite scales, uint8 [rows, bytes of a row]."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[form]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    for start in HALVES.get(form, (0,)):
        scale = rng.normal(0, 2e-4, (*blocks.shape[:2], 1)).astype("<f2")
        blocks[..., start : start + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


def written(path: Path, source: Path, forms: dict[str, str]) -> Path:
    """Write a float32 file with random blocks instead of some tensors.

    Args:
        forms: part of the names of tensors -> format; the first that occurs in a name applies.
    """
    header, content = read_gguf_header(source), np.fromfile(source, np.uint8)
    writer = GGUFWriter(path, header.metadata["general.architecture"])
    for key, value in header.metadata.items():
        if key != "general.architecture":
            add: Any = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            (writer.add_string if isinstance(value, str) else add)(key, value)
    for seed, (name, where) in enumerate(header.tensors.items()):
        form = next((form for part, form in forms.items() if part in name), None)
        if form is None or len(where.shape) < 2:
            values = content[where.start : where.stop].view(np.float32).reshape(where.shape)
            writer.add_tensor(name, values)
            continue
        *lead, columns = where.shape
        data = random_blocks(form, int(np.prod(lead)), columns, seed).reshape(*lead, -1)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def arrays_of(file: Path, name: str, wanted: codes.CodeForm, rows: slice) -> dict[str, np.ndarray]:
    """Return the arrays of some rows of a tensor."""
    where = read_gguf_header(file).tensors[name]
    blocks = np.ascontiguousarray(raw_blocks(map_file(file), where)[rows])
    parts = ["codes", "scale"] if wanted.zero is None else ["codes", "scale", "zero"]
    return {part: codes.part_of_blocks(blocks, where.format, wanted, part) for part in parts}


def created(model_type: str = "llama", **fields: Any) -> Any:
    config = AutoEasyDeLConfig.for_model(model_type, **{**SIZES, **fields}, **ONE)
    return AutoEasyDeLModelForCausalLM.from_config(config, "float32", "float32")


def loaded(path: Path, dtype: str | None = None, **options: Any) -> Any:
    if dtype is not None:
        options |= {"quantization_config": {"dtype": dtype}, "apply_quantization": True}
    return AutoEasyDeLModelForCausalLM.from_pretrained(path, **{**ONE, **options})


def parameters(model: Any) -> dict[str, np.ndarray]:
    state = nnx.state(model)
    read = layer_values(state)
    names = weight_map(type(model), state, model.config).shapes
    return {name: np.asarray(read(name, ()), np.float32) for name in names}


def assert_equal(model: Any, plain: Any, *, exact: bool) -> None:
    assert model.is_quantized
    expected = parameters(plain)
    for name, value in parameters(model.dequantize()).items():
        if exact:
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
        else:
            largest = np.abs(expected[name]).max()
            np.testing.assert_allclose(value, expected[name], 0, 2e-7 * largest, err_msg=name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return created().save_gguf(tmp_path_factory.mktemp("llama") / "model.gguf")


@pytest.mark.parametrize("other", [None, "Q6_K", "Q4_K"])
@pytest.mark.parametrize("form", codes.BLOCKS)
def test_codes_have_the_values_of_the_blocks(
    form: str, other: str | None, llama: Path, tmp_path: Path
) -> None:
    file = written(tmp_path / "model.gguf", llama, {"blk.1.ffn_up": form})
    header = read_gguf_header(file)
    wanted = codes.common_form({form, other or form})
    assert wanted is not None
    found = arrays_of(file, "blk.1.ffn_up.weight", wanted, slice(3, 90, 2))
    numbers = found["codes"]
    if wanted.small:
        numbers = np.stack([numbers & 15, numbers >> 4], -1)
    numbers = numbers.reshape(44, -1, wanted.group).astype(np.float32)
    if wanted.zero is not None:
        assert found["zero"].dtype == wanted.zero
        numbers = numbers - found["zero"][..., None].astype(np.float32)
    values = (numbers * found["scale"][..., None]).reshape(44, -1)
    where = header.tensors["blk.1.ffn_up.weight"]
    raw = np.fromfile(file, np.uint8)[where.start : where.stop].reshape(where.shape[0], -1)
    expected = dequantize(raw, GGMLQuantizationType[form])[3:90:2]
    error = 2e-7 * np.abs(expected).max() if form in codes.SHIFTED else 0
    np.testing.assert_allclose(values, expected, 0, error)


def test_group_without_scale_keeps_its_number(llama: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", llama, {"blk.0.ffn_up": "Q4_1"})
    where = read_gguf_header(file).tensors["blk.0.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    content[where.start : where.start + 4] = np.array([0, 1.5], "<f2").tobytes()
    content[where.start + 20 : where.start + 24] = bytes(4)
    file.write_bytes(content)
    wanted = codes.common_form({"Q4_1"})
    assert wanted is not None
    found = arrays_of(file, "blk.0.ffn_up.weight", wanted, slice(0, 1))
    low = (found["codes"][0, :32] & 15).reshape(2, 16).astype(np.float32)
    values = (low - found["zero"][0, :2, None]) * found["scale"][0, :2, None]
    np.testing.assert_array_equal(values, [[1.5] * 16, [0] * 16])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_model_of_a_family_keeps_codes(model_type: str, dtype: str, tmp_path: Path) -> None:
    model = created(model_type, **FAMILIES[model_type])
    path = model.save_gguf(tmp_path / "model.gguf", dtype=dtype)
    plain = loaded(path)
    for scan in (False, True):
        kept = loaded(path, "gguf", config_kwargs={"scan_layers": scan})
        assert_equal(kept, plain, exact=True)
    ids = jnp.arange(1, 25)[None]
    expected = plain(ids).logits
    error = jnp.abs(kept(ids).logits - expected).max() / jnp.abs(expected).max()
    assert error < 1e-5
    rounded = loaded(path, "gguf_a8")
    assert "activations in 8 bits" in describe(rounded)
    assert jnp.abs(rounded(ids).logits - expected).max() / jnp.abs(expected).max() < 0.2


@pytest.mark.nightly
def test_layers_may_have_different_formats(llama: Path, tmp_path: Path) -> None:
    forms = {
        "blk.1.ffn_down": "Q6_K",
        "blk.2.attn_v": "Q5_K",
        "token_embd": "Q8_0",
        "output": "Q6_K",
        "blk": "Q4_K",
    }
    path = written(tmp_path / "model.gguf", llama, forms)
    plain = loaded(path)
    for scan in (False, True):
        kept = loaded(path, "gguf", config_kwargs={"scan_layers": scan})
        assert_equal(kept, plain, exact=False)
    # Formats that subtract a number from each value keep activations as they are.
    lines = describe(loaded(path, "gguf_a8")).splitlines()
    assert sum("activations in 8 bits" in line for line in lines) == 2
    assert any(line.startswith("int4, groups of 32: ") for line in lines)
    saved = tmp_path / "saved"
    kept.save_pretrained(saved)
    again = loaded(saved)
    for one, other in zip(
        jax.tree.leaves(nnx.state(again)), jax.tree.leaves(nnx.state(kept)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_devices_read_their_part_of_the_codes(llama: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", llama, {"blk": "Q4_K", "output": "Q8_0"})
    sharded = loaded(path, "gguf", sharding_axis_dims=(1, 2, 1, 2, 1))
    whole = jax.tree.leaves(nnx.state(loaded(path, "gguf")))
    for one, other in zip(jax.tree.leaves(nnx.state(sharded)), whole, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.nightly
def test_rules_select_the_matrices(llama: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", llama, {"blk": "Q8_0"})
    rules = [(r"layers\.0\.", None), ("mlp", {"dtype": "gguf"})]
    kept = loaded(path, quantization_config=rules, apply_quantization=True)
    assert describe(kept).startswith("int8, groups of 32: 6 matrices")
    assert_equal(kept, loaded(path), exact=True)


def test_file_without_codes_is_loaded_as_it_is(llama: Path) -> None:
    assert not loaded(llama, "gguf").is_quantized


@pytest.mark.nightly
def test_invalid_use_raises_an_error(llama: Path, tmp_path: Path) -> None:
    model = created(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"keeps the codes of a GGUF file, and .* is none"):
        loaded(tmp_path / "model", "gguf")
    with pytest.raises(ConfigError, match="cannot convert numbers"):
        model.quantize({"dtype": "gguf"})
    with pytest.raises(ConfigError, match="group_size is not for gguf, which"):
        model.quantize({"dtype": "gguf", "group_size": 32})
    rules = [("mlp", {"dtype": "gguf"}), ("", {"dtype": "nf4"})]
    with pytest.raises(ConfigError, match="either the codes of a GGUF file are kept"):
        loaded(llama, quantization_config=rules, apply_quantization=True)
    rules = [("mpl", {"dtype": "gguf"})]
    with pytest.raises(ConfigError, match="mpl"):
        loaded(llama, quantization_config=rules, apply_quantization=True)


def test_damaged_scale_raises_checkpoint_error(llama: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", llama, {"blk.0.ffn_up": "Q8_0"})
    where = read_gguf_header(file).tensors["blk.0.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    content[where.start : where.start + 2] = np.array(np.nan, "<f2").tobytes()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        loaded(file, "gguf")
