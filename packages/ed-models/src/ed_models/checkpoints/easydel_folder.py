"""Folders that EasyDeL saves: recognized by their files, and read as Hugging Face's tensors.

    config.json, tensorstore_index.json, model/model/layers/0/…/kernel/.zarray and chunks

A training checkpoint has further arrays under `tx`, and a folder with LoRA has `lora_a` and
`lora_b` beside the kernels. `model_structure.json` contains a pickle; the shapes and names of the
arrays suffice, so this file is never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.logging import get_logger, once

from ed_models.checkpoints.checks import read_checkpoint_settings
from ed_models.checkpoints.easydel_layout import HEAD_MODULES, LOST_BIASES, get_easydel_rules
from ed_models.checkpoints.tensor_files import (
    DTYPES,
    EASYDEL_INDEX,
    Computed,
    Index,
    JoinedFiles,
    TensorEntry,
    TensorFiles,
    compute_arrays,
)
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.checkpoints.zarr_arrays import ZarrArray, check_file, open_zarr
from ed_models.weights.blocks import ArchitectureFields, Shapes

#: Folders of the arrays: parameters, and the state of the optimizer.
MODEL_PREFIX, OPTIMIZER_PREFIX = "model", "tx"
#: Names of the arrays of an adapter, beside the kernel of its layer.
LORA_NAMES = ("lora_a", "lora_b")
logger = get_logger(__name__)
_MAX_INDEX = 2**27  # bytes
_MAX_ARRAYS = 1_000_000
_MAX_PARTS = 64
_MAX_STEP = 2**31
_PART = re.compile(r"[\w\-]{1,200}")
_MAX_METADATA = 2**16  # bytes
#: `0.mu.PARAMETER.value` and `0.count` of a state; a trainer adds numbers, as in `0.0.count`.
_MOMENT = re.compile(
    r"(?P<place>\d+(?:\.\d+){0,4})\.(?:(?P<kind>mu|nu)\.(?P<parameter>.+)\.value|count)"
)
_RUN = re.compile(r"run-(\d{1,12})")
_ADAPTED = "base_module"
#: Last parts of the names of quantized matrices.
_CODES = ("quant_kernel", "quant_scales", "quant_biases")


def is_easydel_folder(directory: Path) -> bool:
    """Return whether EasyDeL saved the model in a directory."""
    return (directory / EASYDEL_INDEX).is_file() and not any(directory.glob("*.safetensors"))


def find_newest_run(directory: Path) -> Path:
    """Return the newest checkpoint in a directory of runs of EasyDeL's trainer (`run-100`, …);
    other directories are returned unchanged."""
    if (directory / "config.json").is_file():
        return directory
    runs = [
        (int(match[1]), folder)
        for folder in directory.glob("run-*")
        if (match := _RUN.fullmatch(folder.name)) and is_easydel_folder(folder)
    ]
    if not runs:
        return directory
    newest = max(runs)[1]
    once(logger, f"{directory} contains {len(runs)} checkpoints of EasyDeL: {newest.name} is read")
    return newest


class EasyDeLArrays(NamedTuple):
    """The arrays of a folder by name, in groups.

    Attributes:
        model: parameters of the model.
        adapters: matrices of LoRA: name of the layer -> `lora_a` and `lora_b`.
    """

    model: Mapping[str, ZarrArray]
    adapters: Mapping[str, Mapping[str, ZarrArray]]


def read_easydel_index(directory: Path, prefix: str) -> dict[str, ZarrArray]:
    """Return the arrays below a prefix of the index: name with dots -> array.

    Args:
        directory: a folder that EasyDeL saved.
        prefix: `MODEL_PREFIX` or `OPTIMIZER_PREFIX`.

    Raises:
        CheckpointError: The index is damaged or leads out of the folder, or an array is damaged.
    """
    path = directory / EASYDEL_INDEX
    check_file(path, directory)
    if path.stat().st_size > _MAX_INDEX:
        raise CheckpointError(f"{path} is larger than {_MAX_INDEX} bytes: this is no index")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["prefixes"].get(prefix, [])
        paths = [entry["path"] for entry in entries]
        shapes = [entry["shape"] for entry in entries]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error!r}): copy or save the folder of the model again"
        ) from error
    if len(paths) > _MAX_ARRAYS:
        raise CheckpointError(f"{path} names {len(paths)} arrays; at most {_MAX_ARRAYS} are read")
    named: dict[str, ZarrArray] = {}
    for stated, shape in zip(paths, shapes, strict=True):
        parts = stated.split("/") if isinstance(stated, str) else [""]
        is_inside = parts[0] == prefix and 1 < len(parts) <= _MAX_PARTS
        if not is_inside or not all(map(_PART.fullmatch, parts)):
            raise CheckpointError(
                f"{path} names the array {str(stated)[:200]!r}, which is no path below {prefix}: "
                "copy or save the folder of the model again"
            )
        name = ".".join(parts[1:])
        array = open_zarr(directory.joinpath(*parts), directory)
        if name in named or list(array.shape) != shape:
            raise CheckpointError(
                f"{path} names {stated} with the shape {str(shape)[:100]}, "
                f"{'a second time' if name in named else f'and its files have {list(array.shape)}'}"
                ": copy or save the folder of the model again"
            )
        named[name] = array
    return named


def list_easydel_arrays(directory: Path) -> EasyDeLArrays:
    """Return the arrays of a model in a folder that EasyDeL saved.

    Raises:
        CheckpointError: See `read_easydel_index`; or the folder contains quantized matrices, or a
            part of an adapter.
    """
    named = read_easydel_index(directory, MODEL_PREFIX)
    codes = [name for name in named if name.endswith(_CODES)]
    if codes:
        raise CheckpointError(
            f"{directory} contains {len(codes)} arrays of matrices that EasyDeL quantized "
            f"({codes[0]}, …), which are not read: save the model there before it is quantized, "
            "and quantize it here (quantization_config)"
        )
    return _separate_adapters(named, directory)


def _separate_adapters(named: Mapping[str, ZarrArray], directory: Path) -> EasyDeLArrays:
    # A layer with an adapter is a module inside of the adapted one.
    named = {name.replace(f".{_ADAPTED}.", "."): array for name, array in named.items()}
    adapters: dict[str, dict[str, ZarrArray]] = {}
    for name in [name for name in named if name.rpartition(".")[2] in LORA_NAMES]:
        layer, _, part = name.rpartition(".")
        adapters.setdefault(layer, {})[part] = named.pop(name)
    for layer, parts in adapters.items():
        if len(parts) != len(LORA_NAMES):
            raise CheckpointError(
                f"{directory}: the adapter of {layer} has only {', '.join(parts)}; lora_a and "
                "lora_b belong together"
            )
    return EasyDeLArrays(named, adapters)


class EasyDeLMoments(NamedTuple):
    """The state of AdamW in a training checkpoint of EasyDeL.

    Attributes:
        step: number of steps of the run.
        updates: number of updates of the moments.
        mu, nu: first and second moments, arrays of the trained parameters.
    """

    step: int
    updates: int
    mu: EasyDeLArrays
    nu: EasyDeLArrays


def read_easydel_moments(directory: Path) -> EasyDeLMoments:
    """Return the state of the optimizer in a training checkpoint.

    Raises:
        CheckpointError: See `read_easydel_index`; or the folder has no optimizer, or another one
            than AdamW.
    """
    named = read_easydel_index(directory, OPTIMIZER_PREFIX)
    if not named:
        raise CheckpointError(
            f"{directory} has the weights of a model and no optimizer: load it as a model "
            "(name_or_path), and a new optimizer starts"
        )
    moments: dict[str, dict[str, ZarrArray]] = {"mu": {}, "nu": {}}
    counts: dict[str, ZarrArray] = {}
    places: set[str] = set()
    others: list[str] = []
    for name, array in named.items():
        match = _MOMENT.fullmatch(name)
        if match and match["kind"]:
            moments[match["kind"]][match["parameter"]] = array
            places.add(match["place"])
        elif match and array.shape == () and array.dtype.kind == "i":
            counts[match["place"]] = array
        else:
            others.append(name)
    mu, nu = moments.values()
    if others or len(places) != 1 or mu.keys() != nu.keys() or not places <= counts.keys():
        examples = ", ".join((others or list(named))[:3])
        raise CheckpointError(
            f"{directory} has the state of another optimizer than AdamW ({examples}, …), and only "
            "AdamW's is read: load the folder as a model (name_or_path), and a new optimizer starts"
        )
    count = int(counts[places.pop()].read())
    step = read_easydel_step(directory, default=count)
    if not 0 <= count < _MAX_STEP:
        raise CheckpointError(
            f"{directory}: count {count} of the optimizer is no number of updates"
        )
    return EasyDeLMoments(
        step, count, _separate_adapters(mu, directory), _separate_adapters(nu, directory)
    )


def read_easydel_step(directory: Path, default: int) -> int:
    """Return the step that EasyDeL recorded beside a state."""
    path = directory / "metadata.json"
    if not path.exists():
        return default
    check_file(path, directory)
    try:
        if path.stat().st_size > _MAX_METADATA:
            raise ValueError(f"it is larger than {_MAX_METADATA} bytes")
        step = json.loads(path.read_text(encoding="utf-8"))["step"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}): restore it from a copy") from error
    if type(step) is not int or not 0 <= step < _MAX_STEP:
        raise CheckpointError(f"{path}: step {str(step)[:80]!r} is no number of steps")
    return step


class EasyDeLFiles(JoinedFiles):
    """The tensors of Hugging Face's layout in a folder that EasyDeL saved."""

    def __init__(
        self,
        model_type: str,
        tensors: Mapping[str, Computed],
        adapters: Mapping[str, Mapping[str, ZarrArray]],
    ):
        super().__init__(TensorFiles({}), tensors)
        self.model_type, self._adapters = model_type, adapters

    @classmethod
    def open(cls, directory: str | Path, variant: str | None = None) -> EasyDeLFiles:
        """Open the arrays of a folder; values are read when they are needed.

        Args:
            directory: a folder that EasyDeL saved.
            variant: unused: these folders have no variants.

        Raises:
            CheckpointError: See `list_easydel_arrays`.
        """
        directory = Path(directory)
        if variant is not None:
            raise CheckpointError(f"{directory}: EasyDeL saves no variant {variant!r} of a model")
        return cls.relate(list_easydel_arrays(directory), directory)

    @classmethod
    def relate(cls, named: EasyDeLArrays, directory: Path) -> EasyDeLFiles:
        """Return the tensors of arrays, whose model `config.json` of the directory describes.

        Raises:
            CheckpointError: An array has a shape that its name does not allow.
        """
        model_type = str(read_checkpoint_settings(directory / "config.json").get("model_type"))
        tensors = relate_easydel_arrays(named.model, model_type, directory)
        return cls(model_type, tensors, named.adapters)

    def read_adapters(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the matrices of LoRA; EasyDeL adds x A B without a further scale."""
        adapters = {}
        for layer, parts in self._adapters.items():
            a, b = (parts[name] for name in LORA_NAMES)
            if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
                raise CheckpointError(
                    f"{a.folder} and {b.folder.name} have the shapes {list(a.shape)} and "
                    f"{list(b.shape)}, not [inputs, rank] and [rank, outputs]"
                )
            adapters[layer] = a.read(), b.read()
        return adapters

    def reshape_tensors(self, shapes: Shapes, config: ArchitectureFields) -> TensorFiles:
        """Return the tensors of a model: without the copy of a tied head, and with biases of zero
        that EasyDeL has no place for."""
        tied = getattr(config, "tie_word_embeddings", False)
        copies = {
            name: None
            for name in self
            if tied and name not in shapes and name.partition(".")[0] in HEAD_MODULES
        }
        lost = [n for n in LOST_BIASES.get(self.model_type, ()) if n in shapes and n not in self]
        for name in lost:
            once(logger, f"{self.directory}: EasyDeL has no {name}; zeros take its place")
        zeros = {name: np.zeros(shapes[name], np.float32) for name in lost}
        files = self.rename_tensors(copies) if copies else self
        return files.add_tensors(compute_arrays(files, zeros)) if zeros else files


def relate_easydel_arrays(
    named: Mapping[str, ZarrArray], model_type: str, directory: Path
) -> dict[str, Computed]:
    """Return the tensors of Hugging Face's layout that arrays of EasyDeL contain.

    Raises:
        CheckpointError: An array has a shape that its name does not allow.
    """
    try:
        weights = WeightMap(
            get_easydel_rules(model_type), {name: array.shape for name, array in named.items()}
        )
    except ConfigError as error:
        raise CheckpointError(
            f"the arrays in {directory} are not those of a {model_type} ({error}): save the model "
            "in EasyDeL again"
        ) from error
    latest: dict[str, np.ndarray] = {}
    formats = {dtype: name for name, dtype in DTYPES.items()}

    def read_array(name: str, at: tuple[int, ...]) -> np.ndarray:
        """Return an array, or the part of one expert; the last array stays in memory."""
        if not at:
            return named[name].read()
        if name not in latest:
            latest.clear()
            latest[name] = named[name].read()
        return latest[name][at]

    def build(hf_name: str) -> Computed:
        source = named[weights.by_hf[hf_name][0].ours]
        shape = weights.hf_shapes[hf_name]
        size = source.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        entry = TensorEntry(source.folder, formats[source.dtype], shape, 0, size)

        def read(index: Index) -> np.ndarray:
            return weights.save(hf_name, read_array)[index]

        return Computed(entry, read)

    return {name: build(name) for name in weights.hf_shapes}
