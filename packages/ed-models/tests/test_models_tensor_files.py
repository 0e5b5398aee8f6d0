"""Our safetensors reader and writer against the safetensors library and damaged files."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.checkpoints.tensor_files import DTYPES, TensorFiles, read_header
from ed_models.checkpoints.tensor_writer import TensorSpec, parse_size, plan_shards, write_tensors
from safetensors.numpy import load_file, save_file


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 5)) * 3
    out = {"f32": x.astype("f4"), "f64": x, "f16": x.astype("f2"), "u8": (x * 9).astype("u1")}
    out |= {"i64": (x * 9).astype("i8"), "bool": x > 0, "bf16": x.astype(ml_dtypes.bfloat16)}
    out |= {"scalar": np.array(2.5, "f4"), "empty": np.zeros((0, 3), "f4")}
    return out


def specs(tensors):
    return {n: TensorSpec(v.shape, v.dtype) for n, v in tensors.items()}


def test_reader_loads_files_written_by_safetensors(tmp_path):
    tensors = values()
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles.open(tmp_path)
    assert set(files) == set(tensors)
    for name, value in tensors.items():
        assert (files[name].shape, files[name].dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(files.read(name), value)
    np.testing.assert_array_equal(
        files.read("bf16", (slice(1, 5, 2), 3)), tensors["bf16"][1:5:2, 3]
    )


def test_safetensors_library_loads_our_files(tmp_path):
    tensors = values()
    write_tensors(tmp_path, specs(tensors), tensors.__getitem__)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(tensors)
    for name, value in tensors.items():
        assert stored[name].dtype == value.dtype
        np.testing.assert_array_equal(stored[name], value)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("name", [n for n in DTYPES if not n.startswith(("F4", "F6"))])
def test_every_dtype_round_trips_through_files(tmp_path, name):
    codes = np.arange(DTYPES[name].itemsize * 12, dtype=np.uint8) % 2
    tensor = codes.view(DTYPES[name]).reshape(3, 4)
    write_tensors(tmp_path, specs({"x": tensor}), {"x": tensor}.__getitem__)
    files = TensorFiles.open(tmp_path)
    assert files["x"].format == name
    assert files.read("x").tobytes() == tensor.tobytes()


@pytest.mark.parametrize(("name", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_packed_floats_are_unpacked_on_read(tmp_path, name, bits):
    codes = np.arange(8, dtype=np.uint8) + 1
    packed = sum(int(c) << (bits * i) for i, c in enumerate(codes)).to_bytes(bits, "little")
    raw_file(tmp_path / "model.safetensors", {"x": (name, [2, 4], packed)})
    got = TensorFiles.open(tmp_path).read("x", (1, slice(1, 3)))
    assert got.dtype == DTYPES[name]
    np.testing.assert_array_equal(got.view(np.uint8), codes.reshape(2, 4)[1, 1:3])


def raw_file(path, tensors):
    """Write a file from name -> (dtype, shape, bytes)."""
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        at = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": at}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_shards_and_index_are_hugging_faces(tmp_path):
    tensors = {f"t{i}": np.full((10,), i, np.float32) for i in range(5)}  # 40 bytes each
    written = write_tensors(tmp_path, specs(tensors), tensors.__getitem__, max_shard_size=100)
    assert [p.name for p in written] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(written[-1].read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"]["t2"] == "model-00002-of-00003.safetensors"
    files = TensorFiles.open(tmp_path)
    for name, value in tensors.items():
        np.testing.assert_array_equal(files.read(name), value)


def test_a_tensor_larger_than_a_shard_gets_its_own():
    sizes = {"a": TensorSpec((1,), np.dtype("f4")), "b": TensorSpec((99,), np.dtype("f4"))}
    sizes["c"] = sizes["a"]
    assert [*plan_shards(sizes, 16).values()] == [["a"], ["b"], ["c"]]


def test_parse_size_accepts_units_and_rejects_invalid_sizes():
    assert [parse_size(s) for s in (7, "5GB", "1.5 mb", "1GiB")] == [7, 5 * 10**9, 1500000, 2**30]
    for bad in ("big", "5 parsecs", 0, "-1GB"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            parse_size(bad)


def test_a_failed_write_leaves_nothing(tmp_path):
    tensors = {"x": np.zeros((3,), np.float32)}

    def fail(name):
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        write_tensors(tmp_path, specs(tensors), fail)
    assert list(tmp_path.iterdir()) == []


class TestDamage:
    def test_truncated_file_raises_checkpoint_error(self, tmp_path):
        path = tmp_path / "model.safetensors"
        save_file({"x": np.zeros((64,), np.float32)}, path)
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(CheckpointError, match=r"'x' .* does not fit its bytes"):
            TensorFiles.open(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64])
    def test_non_safetensors_file_raises_checkpoint_error(self, tmp_path, content):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            TensorFiles.open(tmp_path)

    def test_broken_header_raises_checkpoint_error(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", 4) + b"{..}")
        with pytest.raises(CheckpointError, match="header is damaged"):
            read_header(path)

    def test_shape_that_does_not_fit_bytes_raises_checkpoint_error(self, tmp_path):
        raw_file(tmp_path / "model.safetensors", {"x": ("F32", [3], b"12345678")})
        with pytest.raises(CheckpointError, match="does not fit its bytes"):
            TensorFiles.open(tmp_path)

    @pytest.mark.parametrize(
        ("offsets", "shape", "message"),
        [
            ([-8, 0], [2], r"'x' .* does not fit its bytes"),
            ([8, 0], [2], r"'x' .* does not fit its bytes"),
            ([0, 8], [-1, -2], r"'x' .* does not fit its bytes"),
            ([0.0, 8.0], [2], "header is damaged"),
            ([0, 8], [2.0], "header is damaged"),
            ([4, 12], [2], "'x' and 'y' overlap at bytes .*; download or save it again"),
            ([8, 16], [2], "'x' and 'y' overlap"),
            ([8, 20], [3], "'y' and 'x' overlap|'x' and 'y' overlap"),
        ],
    )
    def test_impossible_offsets_raise_checkpoint_error(self, tmp_path, offsets, shape, message):
        header = {
            "x": {"dtype": "F32", "shape": shape, "data_offsets": offsets},
            "y": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        }
        text = json.dumps(header).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(20))
        with pytest.raises(CheckpointError, match=message) as error:
            TensorFiles.open(tmp_path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize("weight_map", [[1], {"x": 3}, {"x": None}, "x"])
    def test_an_index_that_names_no_files(self, tmp_path, weight_map):
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
            TensorFiles.open(tmp_path)

    def test_unknown_tensor_dtype_raises_checkpoint_error(self, tmp_path):
        raw_file(tmp_path / "model.safetensors", {"x": ("F99", [2], b"12345678")})
        with pytest.raises(CheckpointError, match="unknown safetensors dtype 'F99'"):
            TensorFiles.open(tmp_path)

    def test_a_file_of_the_index_is_missing(self, tmp_path):
        tensors = {f"t{i}": np.zeros((10,), np.float32) for i in range(4)}
        write_tensors(tmp_path, specs(tensors), tensors.__getitem__, max_shard_size=90)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"not there: model-00002-of-00002"):
            TensorFiles.open(tmp_path)

    def test_the_index_names_a_tensor_that_is_not_in_its_file(self, tmp_path):
        tensors = {f"t{i}": np.zeros((10,), np.float32) for i in range(4)}
        *_, index = write_tensors(tmp_path, specs(tensors), tensors.get, max_shard_size=90)
        content = json.loads(index.read_text())
        content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"1 tensors are not in the files .* ghost"):
            TensorFiles.open(tmp_path)

    def test_pickle_files_raise_checkpoint_error(self, tmp_path):
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="a pickle can run code"):
            TensorFiles.open(tmp_path)

    def test_directory_without_weights_raises_checkpoint_error(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
            TensorFiles.open(tmp_path)

    def test_an_unknown_tensor_gets_a_suggestion(self, tmp_path):
        save_file({"model.norm.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"did you mean 'model\.norm\.weight'"):
            TensorFiles.open(tmp_path).read("model.norm.wieght")
