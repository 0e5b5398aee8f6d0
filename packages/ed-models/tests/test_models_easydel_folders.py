"""Folders that EasyDeL saves: values, limits, and what is never opened.

The folders here are written from formulas of the layout; `tests/parity/test_easydel_folders.py`
compares with folders that the original wrote.
"""

import json
import os
import struct

import numpy as np
import pytest
import tensorstore
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.checkpoints import hub
from ed_models.checkpoints.easydel_folder import list_easydel_arrays
from ed_models.checkpoints.easydel_writer import save_easydel_folder
from ed_models.checkpoints.pickled_files import open_tensors
from ed_models.checkpoints.zarr_arrays import write_zarr

ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
RNG = np.random.default_rng(0)


def values(*shape, dtype="<f4"):
    return RNG.normal(size=shape).astype(dtype)


def write_folder(folder, arrays, **config):
    """Write a folder in EasyDeL's layout: name with dots -> values."""
    folder.mkdir(exist_ok=True)
    entries = []
    for name, array in arrays.items():
        path = "/".join(["model", *name.split(".")])
        write_zarr(folder / path, array)
        entries.append({"path": path, "shape": list(array.shape), "dtype": array.dtype.name})
    write_index(folder, entries)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def write_index(folder, entries):
    index = {"format": "tensorstore", "version": "0", "prefixes": {"model": entries}}
    (folder / "tensorstore_index.json").write_text(json.dumps(index))


KERNEL, NORM, EMBEDDING = values(6, 4), values(4), values(8, 4)
CONVOLUTION, PATCHES, EXPERTS = values(3, 2, 5), values(2, 2, 3, 5), values(3, 4, 6)
GATE, UP, DOWN = values(2, 4, 3), values(2, 4, 3), values(2, 3, 4)


@pytest.mark.parametrize(
    ("model_type", "name", "array", "expected"),
    [
        ("llama", "lm_head.kernel", KERNEL, {"lm_head.weight": KERNEL.T}),
        ("llama", "model.norm.kernel", NORM, {"model.norm.weight": NORM}),
        ("gpt2", "transformer.ln_f.scale", NORM, {"transformer.ln_f.weight": NORM}),
        ("gpt2", "transformer.ln_f.bias", NORM, {"transformer.ln_f.bias": NORM}),
        ("gpt2", "transformer.wte.embedding", EMBEDDING, {"transformer.wte.weight": EMBEDDING}),
        ("mamba", "b.conv1d.kernel", CONVOLUTION, {"b.conv1d.weight": CONVOLUTION.T}),
        ("mamba", "b.mixer.A_log", EMBEDDING, {"b.mixer.A_log": EMBEDDING}),
        (
            "clip",
            "m.mm_input_projection_weight",
            KERNEL,
            {"m.mm_input_projection_weight": KERNEL.T},
        ),
        (
            "aya_vision",
            "h.attention.in_proj_weight",
            KERNEL,
            {"h.attention.in_proj_weight": KERNEL.T},
        ),
        ("llama", "m.scale_weight", NORM, {"m.scale_weight": NORM}),
        ("clip", "e.p.kernel", PATCHES, {"e.p.weight": PATCHES.transpose(3, 2, 0, 1)}),
        (
            "mixtral",
            "m.experts.w1.kernel",
            EXPERTS,
            {f"m.experts.{i}.w1.weight": EXPERTS[i].T for i in range(3)},
        ),
        ("gpt_oss", "m.experts.down_proj.kernel", DOWN, {"m.experts.down_proj": DOWN}),
        ("gpt_oss", "m.experts.down_proj.bias", EMBEDDING, {"m.experts.down_proj_bias": EMBEDDING}),
        ("llama", "q_proj.base_module.kernel", KERNEL, {"q_proj.weight": KERNEL.T}),
    ],
)
def test_array_becomes_tensor_of_hugging_face(tmp_path, model_type, name, array, expected):
    write_folder(tmp_path, {name: array}, model_type=model_type)
    files = open_tensors(tmp_path)
    assert files.keys() == expected.keys()
    for tensor, value in expected.items():
        assert files[tensor].shape == value.shape
        np.testing.assert_array_equal(files.read(tensor), value)
        np.testing.assert_array_equal(files.read(tensor, (slice(1, 3),)), value[1:3])


def test_gate_and_up_of_gpt_oss_alternate(tmp_path):
    arrays = {"m.experts.gate_proj.kernel": GATE, "m.experts.up_proj.kernel": UP}
    files = open_tensors(write_folder(tmp_path, arrays, model_type="gpt_oss"))
    fused = files.read("m.experts.gate_up_proj")
    np.testing.assert_array_equal(fused[..., ::2], GATE)
    np.testing.assert_array_equal(fused[..., 1::2], UP)


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "bfloat16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_several_chunks_are_one_array(tmp_path, dtype, order):
    array = values(10, 6).astype(np.float32).astype("<f2" if dtype == "<f2" else "<f4")
    folder = tmp_path / "model" / "lm_head" / "kernel"
    chunks = {"shape": [10, 6], "chunks": [4, 3], "dtype": dtype, "order": order}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}
    spec["metadata"] = {**chunks, "compressor": {"id": "zstd"}}
    store = tensorstore.open(spec, create=True).result()
    store.write(array.astype(store.dtype.numpy_dtype)).result()
    write_index(tmp_path, [{"path": "model/lm_head/kernel", "shape": [10, 6]}])
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    expected = array.astype(store.dtype.numpy_dtype).T
    np.testing.assert_array_equal(open_tensors(tmp_path).read("lm_head.weight"), expected)


# A damaged or hostile folder.


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "saved", {"lm_head.kernel": KERNEL})


def change_metadata(folder, **changes):
    path = folder / "model/lm_head/kernel/.zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [2**62, 4]}, "sizes"),
        ({"shape": [2**40, 2**40], "chunks": [1, 1]}, "chunks are more"),
        ({"shape": [2**40, 4], "chunks": [2**40, 4]}, "too few"),
        ({"shape": [-6, 4]}, "sizes"),
        ({"shape": [6.0, 4]}, "sizes"),
        ({"shape": [True, 4]}, "sizes"),
        ({"shape": "64"}, "sizes"),
        ({"shape": [1] * 9, "chunks": [1] * 9}, "sizes"),
        ({"chunks": [0, 4]}, "do not divide"),
        ({"chunks": [6]}, "do not divide"),
        ({"chunks": [12, 4]}, "larger than the array"),
        ({"chunks": [3, 4]}, "missing"),
        ({"dtype": "|O"}, "dtype"),
        ({"dtype": [["a", "<f4"]]}, "dtype"),
        ({"dtype": "<c16"}, "dtype"),
        ({"dtype": "<f8"}, "damaged"),
        ({"compressor": {"id": "blosc"}}, "compressor 'blosc'"),
        ({"compressor": {"id": "zstd", "level": "x"}}, "damaged"),
        ({"compressor": ["zstd"]}, "compressor"),
        ({"compressor": None}, "too few"),
        ({"filters": [{"id": "delta"}]}, "filters"),
        ({"order": "K"}, "order"),
        ({"zarr_format": 3}, "zarr_format"),
        ({"dimension_separator": "../"}, "separator"),
        ({"fill_value": {"a": 1}}, "damaged"),
        ({"shape": [4, 6], "chunks": [4, 6]}, "its files have"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(folder, changes, message):
    change_metadata(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_tensors(folder).read("lm_head.weight")


@pytest.mark.parametrize(
    "path",
    [
        "../saved/model/lm_head/kernel",
        "model/../../etc/passwd",
        "/etc/passwd",
        "model",
        "model//kernel",
        "tx/lm_head/kernel",
        "model\\lm_head",
        "model/" + "a/" * 80 + "a",
        ["model"],
        7,
        "",
    ],
)
def test_path_out_of_the_folder_is_refused(folder, path):
    write_index(folder, [{"path": path, "shape": [6, 4]}])
    with pytest.raises(CheckpointError, match="no path below model"):
        open_tensors(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"prefixes": 1}', '{"prefixes": {"model": [1]}}']
)
def test_damaged_index_is_refused(folder, text):
    (folder / "tensorstore_index.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        open_tensors(folder)


def test_array_named_twice_is_refused(folder):
    write_index(folder, [{"path": "model/lm_head/kernel", "shape": [6, 4]}] * 2)
    with pytest.raises(CheckpointError, match="a second time"):
        open_tensors(folder)


def test_links_out_of_the_folder_are_refused(folder, tmp_path):
    kernel = folder / "model/lm_head/kernel"
    outside = tmp_path / "outside"
    kernel.rename(outside)
    kernel.symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out"):
        open_tensors(folder)
    kernel.unlink()
    kernel.mkdir()
    for file in outside.iterdir():
        (kernel / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="is a link out"):
        open_tensors(folder)


def test_snapshot_of_the_hub_may_consist_of_links(folder, tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    snapshot = folder.rename(cache / "snapshots" / "0")
    for number, file in enumerate([f for f in snapshot.rglob("*") if f.is_file()]):
        blob = file.rename(cache / "blobs" / str(number))
        file.symlink_to(os.path.relpath(blob, file.parent))
    np.testing.assert_array_equal(open_tensors(snapshot).read("lm_head.weight"), KERNEL.T)


def test_pipe_in_place_of_a_chunk_is_refused(folder):
    chunk = folder / "model/lm_head/kernel/0.0"
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(CheckpointError, match="missing or no file"):
        open_tensors(folder)


def test_chunk_that_expands_without_end_is_refused(folder):
    """Blocks of zstd that repeat one byte: 4 bytes for 128 KiB."""
    blocks = [struct.pack("<I", (2**17 << 3) | 2 | last)[:3] + b"\0" for last in [0] * 4096 + [1]]
    chunk = folder / "model/lm_head/kernel/0.0"
    chunk.write_bytes(b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks))
    with pytest.raises(CheckpointError, match="damaged array"):
        open_tensors(folder).read("lm_head.weight")


def test_quantized_folder_is_refused_by_name(tmp_path):
    write_folder(tmp_path, {"q_proj.quant_kernel": KERNEL, "q_proj.quant_scales": NORM})
    with pytest.raises(CheckpointError, match="EasyDeL quantized"):
        open_tensors(tmp_path)


def test_half_of_an_adapter_is_refused(tmp_path):
    write_folder(tmp_path, {"q_proj.base_module.kernel": KERNEL, "q_proj.lora_a": KERNEL})
    with pytest.raises(CheckpointError, match="belong together"):
        list_easydel_arrays(tmp_path)


# Whole models.

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LAYER = {
    **dict.fromkeys(("self_attn.q_proj.kernel", "self_attn.o_proj.kernel"), (16, 16)),
    **dict.fromkeys(("self_attn.k_proj.kernel", "self_attn.v_proj.kernel"), (16, 8)),
    **dict.fromkeys(("mlp.gate_proj.kernel", "mlp.up_proj.kernel"), (16, 24)),
    "mlp.down_proj.kernel": (24, 16),
    **dict.fromkeys(("input_layernorm.kernel", "post_attention_layernorm.kernel"), (16,)),
}
LLAMA = {
    "model.embed_tokens.embedding": (32, 16),
    "model.norm.kernel": (16,),
    "lm_head.kernel": (16, 32),
    **{f"model.layers.0.{name}": shape for name, shape in LAYER.items()},
}
#: Values of EasyDeL's file that describe another machine, or that only EasyDeL has.
WRITTEN = {
    "attn_mechanism": "unified_attention",
    "backend": "tpu",
    "fcm_min_ratio": -1,
    "fcm_max_ratio": -1,
    "sharding_axis_dims": [1, 4096, 1, 1, 1],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    arrays = {name: values(*shape) for name, shape in LLAMA.items()}
    folder = write_folder(tmp_path_factory.mktemp("easydel"), arrays, **SHAPE, **WRITTEN)
    (folder / "model_structure.json").mkdir()  # cannot be opened as a file
    return folder


@pytest.fixture(scope="module")
def model(saved):
    return hub.from_pretrained(saved, **ONE)


def read_arrays(folder):
    return {name: array.read() for name, array in list_easydel_arrays(folder).model.items()}


def test_model_of_a_folder_is_saved_as_the_same_folder(model, saved, tmp_path):
    written = read_arrays(save_easydel_folder(model, tmp_path / "again"))
    assert written.keys() == LLAMA.keys()
    for name, array in read_arrays(saved).items():
        np.testing.assert_array_equal(written[name], array)
    assert not (tmp_path / "again" / "model_structure.json").exists()


def test_newest_run_of_a_folder_is_read(tmp_path):
    for step in (9, 100, 20):
        write_folder(tmp_path / f"run-{step}", {})
    (tmp_path / "run-200").mkdir()  # without a model
    assert hub.resolve(tmp_path) == tmp_path / "run-100"
    assert hub.resolve(tmp_path / "run-9") == tmp_path / "run-9"


def test_copy_of_a_tied_head_is_not_read(saved, tmp_path):
    """EasyDeL keeps an unused copy, which training leaves behind."""
    write_folder(tmp_path, read_arrays(saved), **SHAPE, tie_word_embeddings=True)
    loaded = hub.without_values(tmp_path)
    assert loaded.config.tie_word_embeddings


def test_bias_that_easydel_has_no_place_for_is_zero(tmp_path):
    write_folder(tmp_path, {"lm_head.kernel": KERNEL}, model_type="gptj")
    shapes = {"lm_head.weight": (4, 6), "lm_head.bias": (4,)}
    files = open_tensors(tmp_path).reshape_tensors(shapes, None)
    np.testing.assert_array_equal(files.read("lm_head.bias"), np.zeros(4))


def test_writer_refuses_other_families_and_used_folders(model, saved, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="not empty"):
        save_easydel_folder(model, saved)
    monkeypatch.setattr(type(model.config), "model_type", "olmo")
    with pytest.raises(ConfigError, match="llama"):
        save_easydel_folder(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()
