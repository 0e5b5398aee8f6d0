"""Models that are written as GGUF files and read again are the same models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models import AutoEasyDeLConfig, AutoEasyDeLModelForCausalLM
from ed_models.checkpoints import hub
from ed_models.checkpoints.gguf.header import read_gguf_header
from ed_models.checkpoints.loading import weight_map
from ed_models.checkpoints.saving import layer_values
from flax import nnx

ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def created(model_type: str = "llama", **fields: Any) -> Any:
    config = AutoEasyDeLConfig.for_model(model_type, **SIZES, **fields, **ONE)
    return AutoEasyDeLModelForCausalLM.from_config(config, "float32", "float32")


def parameters(model: Any) -> dict[str, np.ndarray]:
    """Return the parameters of each layer by name."""
    state = nnx.state(model)
    read = layer_values(state)
    names = weight_map(type(model), state, model.config).shapes
    return {name: np.asarray(read(name, ()), np.float32) for name in names}


def load(path: Path, **options: Any) -> Any:
    return AutoEasyDeLModelForCausalLM.from_pretrained(path, **ONE, **options)


@pytest.fixture(scope="module")
def llama() -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return created(rope_parameters=rope, attention_bias=True)


def test_model_read_from_float32_gguf_is_bit_equal(llama: Any, tmp_path: Path) -> None:
    path = llama.save_gguf(tmp_path / "model.gguf")
    own, read = parameters(llama), load(path)
    for name, value in parameters(read).items():
        np.testing.assert_array_equal(value, own[name], err_msg=name)
    assert read.config.rope_parameters["rope_type"] == "llama3"
    (tmp_path / "again").mkdir()
    again = read.save_gguf(tmp_path / "again" / "model.gguf")
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0", "q4_0"])
def test_matrices_of_gguf_have_the_values_of_the_format(
    dtype: str, llama: Any, tmp_path: Path
) -> None:
    from gguf import GGMLQuantizationType, dequantize, quantize

    path = llama.save_gguf(tmp_path / "model.gguf", dtype=dtype)
    read, own = parameters(load(path)), parameters(llama)
    name = "model.layers.1.mlp.down_proj.kernel"
    form = GGMLQuantizationType[dtype.upper()]
    expected = dequantize(quantize(np.ascontiguousarray(own[name].T), form), form).T
    np.testing.assert_array_equal(read[name], expected)
    norm = "model.layers.1.input_layernorm.weight"
    np.testing.assert_array_equal(read[norm], own[norm])


@pytest.mark.nightly
def test_int8_codes_represent_q8_0_exactly(llama: Any, tmp_path: Path) -> None:
    path = llama.save_gguf(tmp_path / "model.gguf", dtype="q8_0")
    rules = {"dtype": "int8", "group_size": 32}
    coded = load(path, quantization_config=rules, apply_quantization=True)
    assert coded.is_quantized
    plain = parameters(load(path))
    for name, value in parameters(coded.dequantize()).items():
        np.testing.assert_array_equal(value, plain[name], err_msg=name)


@pytest.mark.nightly
def test_directory_and_file_name_select_the_gguf_file(llama: Any, tmp_path: Path) -> None:
    llama.save_gguf(tmp_path / "one.gguf", dtype="f16")
    assert load(tmp_path).config.hidden_size == 64
    llama.save_gguf(tmp_path / "two.gguf", dtype="f16")
    with pytest.raises(CheckpointError, match=r"one\.gguf, two\.gguf"):
        load(tmp_path)
    assert load(tmp_path, gguf_file="two.gguf").config.hidden_size == 64
    with pytest.raises(CheckpointError, match="three"):
        load(tmp_path, gguf_file="three.gguf")
    with pytest.raises(CheckpointError, match="no file"):
        load(tmp_path, gguf_file="../one.gguf")


@pytest.mark.nightly
def test_body_and_classifier_load_from_gguf(llama: Any, tmp_path: Path) -> None:
    path = llama.save_gguf(tmp_path / "model.gguf")
    body = hub.from_pretrained(path, task="base-module", **ONE)
    own = parameters(llama)
    for name, value in parameters(body).items():
        np.testing.assert_array_equal(value, own[f"model.{name}"], err_msg=name)


@pytest.mark.nightly
def test_model_is_split_over_files(llama: Any, tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = llama.save_gguf(tmp_path / "whole.gguf")
    header, content = read_gguf_header(path), np.fromfile(path, np.uint8)
    names = sorted(header.tensors)
    for part in (0, 1):
        writer = GGUFWriter(tmp_path / f"model-{part + 1:05d}-of-00002.gguf", "llama")
        for key, value in header.metadata.items():
            if part == 0 and key != "general.architecture":
                add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
                add = writer.add_string if isinstance(value, str) else add
                add(key, value)
        writer.add_uint16("split.count", 2)
        for name in names[part::2]:
            where = header.tensors[name]
            values = content[where.start : where.stop].view(np.float32).reshape(where.shape)
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    own = parameters(llama)
    for name, value in parameters(load(tmp_path)).items():
        np.testing.assert_array_equal(value, own[name], err_msg=name)
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="00002-of-00002"):
        load(tmp_path / "model-00001-of-00002.gguf")


@pytest.mark.nightly
def test_fused_and_merged_tensors_of_other_writers_are_read(tmp_path: Path) -> None:
    """Queries, keys and values in one tensor, and experts with gate and input in one tensor."""
    from ed_models.checkpoints.gguf import layouts, table
    from ed_models.checkpoints.gguf.writer import write_file

    model = created("qwen3_moe", num_experts=4, moe_intermediate_size=32, norm_topk_prob=True)
    row = table.row_of_model(model.config)
    other = replace(row, rules=(*layouts.JOINED_QKV, *layouts.JOINED_EXPERTS))
    state = nnx.state(model)
    shapes = weight_map(type(model), state, model.config).shapes
    path = tmp_path / "model.gguf"
    write_file(
        path,
        other,
        model.config,
        shapes,
        layer_values(state),
        dtype="f32",
        name="model",
        tokenizer={},
    )
    assert "blk.0.ffn_gate_up_exps.weight" in read_gguf_header(path).tensors
    own = parameters(model)
    for name, value in parameters(load(path)).items():
        np.testing.assert_array_equal(value, own[name], err_msg=name)


@pytest.mark.nightly
def test_model_that_llama_cpp_computes_otherwise_is_not_written(tmp_path: Path) -> None:
    model = created("mistral", sliding_window=8)
    with pytest.raises(CheckpointError, match="sliding_window is 8"):
        model.save_gguf(tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_unknown_architecture_names_the_known_ones(llama: Any, tmp_path: Path) -> None:
    path = llama.save_gguf(tmp_path / "model.gguf")
    content = path.read_bytes().replace(b"llama", b"lamma")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="architecture 'lamma', which is not read"):
        load(path)


@pytest.mark.nightly
def test_quantized_model_and_unknown_format_raise_config_errors(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dequantize"):
        llama.quantize({"dtype": "int8"}).save_gguf(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="q5_k"):
        llama.save_gguf(tmp_path / "model.gguf", dtype="q5_k")
    with pytest.raises(ConfigError, match="directory"):
        llama.save_gguf(tmp_path)


@pytest.mark.nightly
def test_tensors_that_do_not_fit_the_metadata_are_listed(llama: Any, tmp_path: Path) -> None:
    path = llama.save_gguf(tmp_path / "model.gguf")
    content = path.read_bytes().replace(b"blk.0.ffn_down", b"blk.0.ffn_dowm")
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"missing \(1\)") as caught:
        load(path)
    assert "blk.0.ffn_down.weight" in str(caught.value)


@pytest.mark.nightly
def test_parameters_are_read_by_every_device(llama: Any, tmp_path: Path) -> None:
    path = llama.save_gguf(tmp_path / "model.gguf", dtype="q8_0")
    whole = parameters(load(path))
    dims = (1, 2, 1, 2, 1)
    sharded = AutoEasyDeLModelForCausalLM.from_pretrained(path, sharding_axis_dims=dims)
    assert len(jax.tree.leaves(nnx.state(sharded))[0].sharding.device_set) == 4
    for name, value in parameters(sharded).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
