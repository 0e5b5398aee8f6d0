"""EasyLM's streaming checkpoints of LLaMA: read, written, and turned into Hugging Face's layout.

A stream is a file of msgpack records, one for each array: `(key, bytes)`, the key a tuple of names,
the bytes flax's msgpack of the array. Parameters are under `transformer` and `lm_head`, in a
whole training state under `params/params` before these. A matrix is `[in, out]`; queries and keys
are rotated in neighbouring pairs of features, in Hugging Face's files in two halves.

Legend: o outputs, i inputs of a matrix.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.checkpoints import hub
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.checkpoints.tensor_writer import TensorSpec, write_tensors
from flax import serialization, traverse_util
from jaxtyping import Shaped

# Names in a layer: Hugging Face's, and EasyLM's.
_OF_A_LAYER = {
    "self_attn.q_proj.weight": "attention/wq/kernel",
    "self_attn.k_proj.weight": "attention/wk/kernel",
    "self_attn.v_proj.weight": "attention/wv/kernel",
    "self_attn.o_proj.weight": "attention/wo/kernel",
    "mlp.gate_proj.weight": "feed_forward/w1/kernel",
    "mlp.down_proj.weight": "feed_forward/w2/kernel",
    "mlp.up_proj.weight": "feed_forward/w3/kernel",
    "input_layernorm.weight": "attention_norm/kernel",
    "post_attention_layernorm.weight": "ffn_norm/kernel",
}
_AROUND = {
    "model.embed_tokens.weight": "transformer/wte/embedding",
    "model.norm.weight": "transformer/ln_f/kernel",
}
_HEAD = "lm_head.weight", "lm_head/kernel"
# Prefixes of the parameters in a complete training state, and in a file of parameters.
_LEADS = ("params/params/", "params/")
_READ = 1 << 24


class Record(NamedTuple):
    """An array of a stream: its place in the file, its shape and its dtype."""

    at: int
    shape: tuple[int, ...]
    dtype: np.dtype


class StreamFile(Mapping[str, Record]):
    """The arrays of a stream by name, `transformer/h/0/attention/wq/kernel`; read one at a time.

    Args:
        path: the file.

    Raises:
        CheckpointError: it is no stream, or is cut.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._records: dict[str, Record] = {}
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            unpacker = _unpacker(file)
            while unpacker.tell() < size:
                at = unpacker.tell()
                name, value = self._next(unpacker)
                if isinstance(value, np.ndarray):
                    self._records[name] = Record(at, value.shape, value.dtype)

    def __getitem__(self, name: str) -> Record:
        return self._records[name]

    def __iter__(self) -> Any:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, name: str) -> np.ndarray:
        """Return an array."""
        with self.path.open("rb") as file:
            file.seek(self._records[name].at)
            return self._next(_unpacker(file))[1]

    def _next(self, unpacker: msgpack.Unpacker) -> tuple[str, Any]:
        try:
            key, value = unpacker.unpack()
            if not all(isinstance(part, str) for part in key):
                raise ValueError(f"the key {key!r}")
            return "/".join(key), serialization.msgpack_restore(value)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CheckpointError(
                f"{self.path} is not a complete stream of EasyLM "
                f"({type(error).__name__}: {error}): "
                "pass a complete file of StreamingCheckpointer"
            ) from error


def _unpacker(file: object) -> msgpack.Unpacker:
    return msgpack.Unpacker(file, read_size=_READ, max_buffer_size=0)  # 0: as large as a record


def write_stream(path: str | Path, arrays: Iterable[tuple[str, np.ndarray]]) -> Path:
    """Write arrays by name as a stream; the file appears when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    packer = msgpack.Packer()
    with partial.open("wb") as file:
        for name, array in arrays:
            file.write(packer.pack((tuple(name.split("/")), serialization.to_bytes(array))))
    partial.replace(path)
    return path


class TreeFile(Mapping[str, Record]):
    """The arrays of a file of flax, a tree of parameters that is one msgpack object.

    Args:
        path: the file; the arrays are in memory.

    Raises:
        CheckpointError: it is no such file, or is cut.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            tree = serialization.msgpack_restore(self.path.read_bytes())
            flat = traverse_util.flatten_dict(tree, sep="/")
        except (ValueError, TypeError, AssertionError, msgpack.UnpackException) as error:
            raise CheckpointError(
                f"{self.path} is not a complete file of flax's msgpack "
                f"({type(error).__name__}: {error}): pass a complete file"
            ) from error
        self._arrays = {k: v for k, v in flat.items() if isinstance(v, np.ndarray)}

    def __getitem__(self, name: str) -> Record:
        array = self._arrays[name]
        return Record(0, array.shape, array.dtype)

    def __iter__(self) -> Any:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def read(self, name: str) -> np.ndarray:
        """Return an array."""
        return self._arrays[name]


def open_arrays(path: str | Path) -> StreamFile | TreeFile:
    """Open a stream, or a file of flax: such a file begins with a map, and a stream with a list."""
    with Path(path).open("rb") as file:
        first = file.read(1)
    is_map = first[:1] in (b"\xde", b"\xdf") or (first and 0x80 <= first[0] <= 0x8F)
    return TreeFile(path) if is_map else StreamFile(path)


def get_parameter_names(arrays: Iterable[str]) -> dict[str, str]:
    """Return EasyLM's name -> the stored name, of the parameters in a file of parameters or of a
    complete training state."""
    names = list(arrays)
    lead = next((lead for lead in _LEADS if any(name.startswith(lead) for name in names)), "")
    return {name.removeprefix(lead): name for name in names if name.startswith(lead)}


def write_tree(path: str | Path, arrays: Iterable[tuple[str, np.ndarray]]) -> Path:
    """Write arrays by name as one file of flax, which appears when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = traverse_util.unflatten_dict(dict(arrays), sep="/")
    partial = path.with_name(f".{path.name}.part")
    partial.write_bytes(serialization.msgpack_serialize(tree))
    partial.replace(path)
    return path


class Tensor(NamedTuple):
    """A tensor of LLaMA in both layouts.

    Attributes:
        name: EasyLM's.
        to_easylm: of an array of Hugging Face's.
        from_easylm: converts an array of EasyLM.
    """

    name: str
    to_easylm: Callable[[np.ndarray], np.ndarray]
    from_easylm: Callable[[np.ndarray], np.ndarray]


def _layout(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return Hugging Face's name -> the tensor, of a LLaMA with an untied head.

    Args:
        config: fields of its `config.json`.
    """
    heads = int(config["num_attention_heads"])
    rotated = {"wq": heads, "wk": int(config.get("num_key_value_heads") or heads)}

    def tensor(name: str) -> Tensor:
        if name.endswith(("norm/kernel", "ln_f/kernel", "embedding")):
            return Tensor(name, np.asarray, np.asarray)
        turned = rotated.get(name.split("/")[-2])
        if turned is None:
            return Tensor(name, np.transpose, np.transpose)
        return Tensor(
            name,
            lambda array: pair_rows(array, turned).T,
            lambda array: in_halves(array.T, turned),
        )

    names = {**_AROUND, _HEAD[0]: _HEAD[1]}
    for layer in range(int(config["num_hidden_layers"])):
        for hf_name, easylm_name in _OF_A_LAYER.items():
            names[f"model.layers.{layer}.{hf_name}"] = f"transformer/h/{layer}/{easylm_name}"
    return {hf_name: tensor(easylm_name) for hf_name, easylm_name in names.items()}


def pair_rows(matrix: Shaped[np.ndarray, "o i"], heads: int) -> Shaped[np.ndarray, "o i"]:
    """Order the features of each head so that those which are rotated together are neighbours."""
    outputs, inputs = matrix.shape
    halves = matrix.reshape(heads, 2, outputs // heads // 2, inputs)
    return halves.transpose(0, 2, 1, 3).reshape(outputs, inputs)


def in_halves(matrix: Shaped[np.ndarray, "o i"], heads: int) -> Shaped[np.ndarray, "o i"]:
    """Undo `pair_rows`."""
    outputs, inputs = matrix.shape
    pairs = matrix.reshape(heads, outputs // heads // 2, 2, inputs)
    return pairs.transpose(0, 2, 1, 3).reshape(outputs, inputs)


def to_easylm(source: str | Path, target: str | Path) -> Path:
    """Write a LLaMA in Hugging Face's layout as a stream.

    Args:
        source: its directory, or its name on the hub.
        target: the file to write.

    Raises:
        CheckpointError: it has other tensors than EasyLM's LLaMA.
    """
    directory = hub.resolve(str(source))
    config, files = _config(directory), TensorFiles.open(directory)
    tensors = _layout(config)
    tied = _HEAD[0] not in files
    _check_names(tensors, {*files, _HEAD[0]}, str(source))

    def read(name: str, tensor: Tensor) -> np.ndarray:
        stored_name = "model.embed_tokens.weight" if tied and name == _HEAD[0] else name
        return np.ascontiguousarray(tensor.to_easylm(files.read(stored_name)))

    return write_stream(target, ((t.name, read(name, t)) for name, t in tensors.items()))


def from_easylm(source: str | Path, target: str | Path, config: str | Path) -> Path:
    """Write a stream as a directory in Hugging Face's layout.

    Args:
        source: the file.
        target: the directory to write.
        config: a directory with the `config.json` of the model, or its name on the hub: a stream
            lacks the number of heads.

    Raises:
        CheckpointError: the stream is damaged, or of another model than the configuration; or the
            directory holds something.
    """
    target = Path(target)
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty: name a new directory")
    stream, settings = open_arrays(source), _config(hub.resolve(str(config)))
    parameter_names = get_parameter_names(stream)
    tensors = _layout(settings)
    names = {tensor.name: hf_name for hf_name, tensor in tensors.items()}
    _check_names(names, parameter_names, str(source))
    tied = bool(settings.get("tie_word_embeddings"))
    if tied and not np.array_equal(
        stream.read(parameter_names[_HEAD[1]]).T,
        stream.read(parameter_names["transformer/wte/embedding"]),
    ):
        raise CheckpointError(
            f"{source} has a separate head, but {config} has tie_word_embeddings: set it to "
            "false there"
        )
    output_tensors = {
        hf_name: tensor for hf_name, tensor in tensors.items() if not (tied and hf_name == _HEAD[0])
    }
    specs = {}
    for hf_name, tensor in output_tensors.items():
        record = stream[parameter_names[tensor.name]]
        turned = tensor.name not in _AROUND.values() and len(record.shape) == 2
        specs[hf_name] = TensorSpec(record.shape[::-1] if turned else record.shape, record.dtype)

    def read(hf_name: str) -> np.ndarray:
        array = stream.read(parameter_names[output_tensors[hf_name].name])
        try:
            return np.ascontiguousarray(output_tensors[hf_name].from_easylm(array))
        except ValueError as error:
            raise CheckpointError(
                f"{hf_name} of {source}, shaped {list(array.shape)}, does not divide into the "
                "heads of "
                f"{config}: pass the configuration of this model"
            ) from error

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as partial:
        model_directory = Path(partial) / "model"
        model_directory.mkdir()
        write_tensors(model_directory, specs, read)
        (model_directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
        model_directory.replace(target)
    return target


def _config(directory: Path) -> dict[str, Any]:
    """The fields of a LLaMA's configuration."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    if config.get("model_type") not in ("llama", "mistral"):
        raise ConfigError(
            f"EasyLM's streams are of LLaMA, and {directory} is a {config.get('model_type')!r}: "
            "convert between checkpoints and Hugging Face's layout instead"
        )
    return {"architectures": ["LlamaForCausalLM"], **config}


def _check_names(expected_names: Iterable[str], there: Iterable[str], source: str) -> None:
    missing, more = {*expected_names} - {*there}, {*there} - {*expected_names}
    for names, problem in ((missing, "has no"), (more, "has, and its LLaMA has not,")):
        if names:
            examples = ", ".join(sorted(names)[:3])
            raise CheckpointError(
                f"{source} {problem} {examples} ({len(names)} tensors): it is of another model "
                "than its "
                "config.json"
            )
