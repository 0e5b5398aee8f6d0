"""Streams of EasyLM's: read as its own code wrote them, written as it reads them, compared."""

from __future__ import annotations

import json

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.families.llama import LlamaForCausalLM
from ed_trainers import CheckpointManager
from ed_trainers.compare import differences
from ed_trainers.convert import convert
from ed_trainers.easylm import StreamFile, TreeFile, in_halves, open_arrays, pair_rows, write_tree
from flax import serialization, traverse_util
from safetensors.numpy import load_file, save_file


def streamed(path, tree):
    """What EasyLM's `StreamingCheckpointer.save_train_state_to_file` does."""
    packer = msgpack.Packer()
    with path.open("wb") as file:
        for key, value in traverse_util.flatten_dict(tree).items():
            file.write(packer.pack((key, serialization.to_bytes(value))))
    return path


def restored(path):
    """What its `load_checkpoint` does."""
    tree = {}
    with path.open("rb") as file:
        for key, value in msgpack.Unpacker(file, read_size=83886080, max_buffer_size=0):
            tree[tuple(key)] = serialization.from_bytes(None, value)
    return tree


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
SHAPES = {
    **{f"self_attn.{name}_proj": (16, 16) for name in "qo"},
    **{f"self_attn.{name}_proj": (8, 16) for name in "kv"},
    **{f"mlp.{name}_proj": (24, 16) for name in ("gate", "up")},
    "mlp.down_proj": (16, 24),
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
}


def written(directory, *, dtype="float32", **changes):
    """A LLaMA in Hugging Face's layout."""
    shapes = {"model.embed_tokens": (32, 16), "model.norm": (16,), "lm_head": (32, 16)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
    config = {**CONFIG, **changes}
    if config["tie_word_embeddings"]:
        del shapes["lm_head"]
    random = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": random.normal(size=shape).astype(jnp.dtype(dtype))
        for name, shape in shapes.items()
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return written(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def stream(saved, tmp_path_factory):
    return convert(saved, tmp_path_factory.mktemp("stream") / "streaming_params", easylm=True)


def test_there_and_back_nothing_changes(saved, stream, tmp_path):
    back = convert(stream, tmp_path / "back", config=saved)
    assert list(differences(saved, back)) == []
    assert json.loads((back / "config.json").read_text()) == CONFIG


def test_easylm_stream_has_easylm_layout(saved, stream):
    tree = restored(stream)
    assert tree[("transformer", "h", "1", "feed_forward", "w2", "kernel")].shape == (24, 16)
    assert tree[("transformer", "h", "0", "attention", "wk", "kernel")].shape == (16, 8)
    assert tree[("lm_head", "kernel")].shape == (16, 32)
    # Its attention turns neighbouring features, as one complex number; ours two halves of a head.
    q, k = (tree[("transformer", "h", "0", "attention", name, "kernel")] for name in ("wq", "wk"))
    x = np.random.default_rng(0).normal(size=(2, 16))
    angles = np.arange(2)[:, None, None] * 10000.0 ** (-np.arange(2) / 2)
    turned = [
        (x @ kernel).reshape(2, -1, 2, 2) @ [1, 1j] * np.exp(1j * angles) for kernel in (q, k)
    ]
    theirs = (turned[0][1, 0] * turned[1][0, 0].conj()).sum().real
    weights = load_file(saved / "model.safetensors")

    def ours(name, position):
        matrix = weights[f"model.layers.0.self_attn.{name}.weight"]
        first, second = np.split((matrix @ x[position])[:4], 2)
        cos, sin = np.cos(angles[position, 0]), np.sin(angles[position, 0])
        return np.concatenate([first * cos - second * sin, second * cos + first * sin])

    score = ours("q_proj", 1) @ ours("k_proj", 0)
    assert theirs == pytest.approx(score, rel=1e-5)


def test_a_training_state_has_its_parameters_under_params(saved, stream, tmp_path):
    tree = traverse_util.unflatten_dict(restored(stream))
    state = {
        "step": np.int32(7),
        "params": {"params": tree},
        "opt_state": {"0": {"mu": {"params": {"lm_head": {"kernel": np.ones((16, 32))}}}}},
    }
    path = streamed(tmp_path / "streaming_train_state", state)
    assert list(differences(saved, convert(path, tmp_path / "out", config=saved))) == []


def test_a_file_of_flax_has_the_arrays_of_the_stream(saved, stream, tmp_path):
    names = open_arrays(stream)
    path = write_tree(tmp_path / "flax_params", ((name, names.read(name)) for name in names))
    assert serialization.msgpack_restore(path.read_bytes())["lm_head"]["kernel"].shape == (16, 32)
    assert isinstance(open_arrays(path), TreeFile)
    assert list(differences(stream, path)) == []
    assert list(differences(saved, convert(path, tmp_path / "out", config=saved))) == []
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="not a complete file of flax"):
        convert(path, tmp_path / "cut", config=saved)


def test_checkpoints_become_streams_and_two_are_compared(saved, stream, tmp_path):
    model = LlamaForCausalLM.from_pretrained(saved, sharding_axis_dims=(1, 1, 1, 1, 1))
    CheckpointManager(tmp_path / "states").save(model, step=3)
    other = convert(tmp_path / "states/3", tmp_path / "other", easylm=True)
    assert list(differences(stream, other)) == []
    tree = traverse_util.unflatten_dict(restored(stream))
    tree["transformer"]["ln_f"]["kernel"] = tree["transformer"]["ln_f"]["kernel"] + 0.5
    (one,) = differences(stream, streamed(tmp_path / "changed", tree))
    assert one.name == "transformer.ln_f.kernel" and one.largest == pytest.approx(0.5)


def test_tied_bfloat16_model_round_trips_through_easylm(tmp_path):
    written(tmp_path / "tied", dtype="bfloat16", tie_word_embeddings=True)
    stream = convert(tmp_path / "tied", tmp_path / "stream", easylm=True)
    kernel = StreamFile(stream).read("lm_head/kernel")
    assert kernel.dtype == jnp.bfloat16 and kernel.shape == (16, 32)
    back = convert(stream, tmp_path / "back", config=tmp_path / "tied")
    assert list(differences(tmp_path / "tied", back)) == []


def test_the_order_of_features_is_undone():
    matrix = np.arange(48).reshape(8, 6)
    assert np.array_equal(in_halves(pair_rows(matrix, 2), 2), matrix)
    assert pair_rows(matrix, 2)[:, 0].tolist() == [0, 12, 6, 18, 24, 36, 30, 42]


def test_invalid_easylm_conversions_raise_error(saved, stream, tmp_path):
    cut = tmp_path / "cut"
    cut.write_bytes(stream.read_bytes()[:-10])
    text = tmp_path / "text"
    text.write_text("no stream at all")
    for path in (cut, text):
        with pytest.raises(CheckpointError, match=r"not a complete stream .*StreamingCheckp"):
            convert(path, tmp_path / "out", config=saved)
    with pytest.raises(ConfigError, match="only a stream requires one"):
        convert(stream, tmp_path / "out")
    with pytest.raises(ConfigError, match="only a stream requires one"):
        convert(saved, tmp_path / "out", config=saved)

    def other(name, **changes):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        return folder

    for folder, words in [
        (other("deep", num_hidden_layers=3), "has no transformer/h/2/"),
        (other("flat", num_hidden_layers=1), "its LLaMA has not, transformer/h/1/"),
        (other("heads", num_attention_heads=3), "does not divide into the heads"),
        (other("tied", tie_word_embeddings=True), "has a separate head"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            convert(stream, tmp_path / "out", config=folder)
    with pytest.raises(CheckpointError, match="is not empty: name a new directory"):
        convert(stream, saved, config=saved)
    with pytest.raises(ConfigError, match="EasyLM's streams are of LLaMA"):
        convert(stream, tmp_path / "out", config=other("bert", model_type="bert"))
