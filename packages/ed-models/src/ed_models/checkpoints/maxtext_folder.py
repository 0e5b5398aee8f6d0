"""Folders of MaxText and tunix: recognized by their files, and read as Hugging Face's tensors.

    config.json, tokenizer.json            of the model, next to the checkpoint
    checkpoints/100/items/_METADATA, …     or 100/items, items, or the item itself (MaxText)
    100/model_params/_METADATA, …          tunix

These programs save no `config.json`: the one of the model is copied into the folder, or into one of
the three folders above the item. The state of the optimizer is not read.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_infra.logging import get_logger, once

from ed_models.checkpoints.checks import read_checkpoint_settings
from ed_models.checkpoints.gguf.directory import write_settings_folder, write_settings_json
from ed_models.checkpoints.maxtext_layout import (
    MAXTEXT,
    MAXTEXT_ROWS,
    TUNIX,
    ArrayPlace,
    Family,
    StoredParameter,
    convert_to_tensor,
    get_tensor_shape,
    list_places,
)
from ed_models.checkpoints.orbax_arrays import (
    MODEL_CONFIG,
    ORBAX_METADATA,
    OrbaxArray,
    OrbaxFolder,
    find_orbax_config,
    open_orbax_folder,
)
from ed_models.checkpoints.tensor_files import (
    DTYPES,
    Computed,
    Index,
    JoinedFiles,
    TensorEntry,
    TensorFiles,
)
from ed_models.weights.blocks import ArchitectureFields, Shape

logger = get_logger(__name__)
#: Files next to `config.json` that belong to a model.
_BESIDE = ("generation_config.json", "tokenizer*", "*.jinja", "*.model", "special_tokens_map.json")
_BESIDE += ("vocab.json", "merges.txt", "added_tokens.json", "preprocessor_config.json")
#: The embedding, whose name determines the program and the path of the parameters.
_EMBEDDINGS: Mapping[str, Mapping[str, Family]] = {
    "token_embedder.embedding": MAXTEXT,
    "embedder.input_embedding": TUNIX,
}
_EMBEDDING = re.compile(
    rf"(?P<path>(?:[\w\-]+\.)*?)(?P<name>{'|'.join(map(re.escape, _EMBEDDINGS))})"
    r"(?P<end>\.value)?"
)
#: Parts of the names of optimizers' states, which have the shapes of parameters.
_OPTIMIZER = frozenset({"opt_state", "optimizer", "mu", "nu"})
#: Multimodal models whose language model is read, and the class of the language model.
_TEXT_CLASSES = {"gemma3": "Gemma3ForCausalLM"}
#: Bytes of whole arrays that stay in memory while the layers of a stack are read.
_KEPT = 2**28
_MAX_EXPERTS = 2**14


def write_maxtext_settings(item: Path, folder: Path | None = None) -> Path:
    """Return a directory in Hugging Face layout for an item of Orbax, whose tensors are read
    from the item.

    Args:
        item: the folder with the parameters.
        folder: the folder with `config.json` and the tokenizer of the model; None = next to the
            item.

    Raises:
        CheckpointError: there is no `config.json`, or the item is damaged.
    """
    config = find_orbax_config(item, folder)
    if config is None:
        raise CheckpointError(
            f"{folder or item} has no {MODEL_CONFIG}: MaxText and tunix save none. Copy "
            f"{MODEL_CONFIG} and the tokenizer of the original model into {folder or item.parent} "
            "(hf download ORGANIZATION/NAME config.json tokenizer.json --local-dir FOLDER), or "
            "convert with elarge convert SOURCE TARGET --config FOLDER"
        )

    def write_files(directory: Path) -> None:
        settings = {**read_checkpoint_settings(config, TaskType.CAUSAL_LM)}
        stored_type = json.loads(config.read_text(encoding="utf-8")).get("model_type")
        if stored_type in _TEXT_CLASSES:
            settings["architectures"] = [_TEXT_CLASSES[stored_type]]
        write_settings_json(directory / MODEL_CONFIG, settings)
        settings["dtype"] = MaxTextFiles.open_item(item, directory).widest_dtype
        settings.pop("torch_dtype", None)
        write_settings_json(directory / MODEL_CONFIG, settings)
        for pattern in _BESIDE:
            for file in config.parent.glob(pattern):
                if file.is_file():
                    shutil.copy(file, directory / file.name)

    status = config.stat()
    version = config, status.st_mtime_ns, status.st_size
    return write_settings_folder(item / ORBAX_METADATA, write_files, version)


class MaxTextFiles(JoinedFiles):
    """The tensors of Hugging Face's layout in a folder of MaxText or tunix."""

    def __init__(self, tensors: Mapping[str, Computed], widest_dtype: str):
        super().__init__(TensorFiles({}), tensors)
        self.widest_dtype = widest_dtype

    @classmethod
    def open_item(cls, item: Path, directory: Path, variant: str | None = None) -> MaxTextFiles:
        """Open the arrays of an item of Orbax; values are read when a caller reads them.

        Args:
            item: the folder with the parameters.
            directory: the directory with `config.json`.
            variant: unused: these folders have no variants.

        Raises:
            CheckpointError: an array is absent, left over or damaged, or has a shape that its name
                does not allow; or the layout of the family is not known.
        """
        if variant is not None:
            raise CheckpointError(f"{item}: Orbax saves no variant {variant!r} of a model")
        settings = read_checkpoint_settings(directory / MODEL_CONFIG)
        folder = open_orbax_folder(item)
        path, end, families = _find_parameters(folder)
        model_type = str(settings.get("model_type"))
        if model_type not in families:
            program = next(iter(families.values())).program
            raise CheckpointError(
                f"{item} has {program}'s names, and {MODEL_CONFIG} the model type {model_type!r}, "
                f"whose layout is not known; known are: {', '.join(families)}"
            )
        family = families[model_type]
        config = registry.get_config(model_type).from_dict(dict(settings))
        names = {
            name.removeprefix(path).removesuffix(end): name
            for name in folder.names
            if name.startswith(path) and name.endswith(end)
        }
        stacked = any(name.startswith("decoder.layers.") for name in names)
        places = _select_places(family, config, names, folder, stacked=stacked)
        arrays = {
            place.array: folder.open_array(names[place.array])
            for place in dict.fromkeys(place for _, _, place in places)
        }
        plain = [
            arrays[place.array].dtype
            for part, _, place in places
            if part.inputs and not part.has_other_values
        ]
        widest = max(plain, key=lambda dtype: dtype.itemsize)
        reader = _Reader(config)
        tensors = {}
        for part, layer, place in places:
            tensors |= reader.relate(arrays[place.array], part, layer, place)
        return cls(tensors, widest.name)


def _find_parameters(folder: OrbaxFolder) -> tuple[str, str, Mapping[str, Family]]:
    """Return the path in front of the parameters, the end of their names, and the families."""
    matches = [
        match
        for match in map(_EMBEDDING.fullmatch, sorted(folder.names, key=len))
        if match and not _OPTIMIZER & {*match["path"].split(".")}
    ]
    if not matches:
        names = ", ".join(sorted(folder.names)[:3]) or "none"
        raise CheckpointError(
            f"{folder.path} has arrays of Orbax, and none is an embedding of MaxText or tunix "
            f"({' or '.join(_EMBEDDINGS)}); its arrays are: {names}. Use the folder of a model of "
            "MaxText or tunix"
        )
    match = matches[0]
    return match["path"], match["end"] or "", _EMBEDDINGS[match["name"]]


def _select_places(
    family: Family,
    config: ArchitectureFields,
    names: Mapping[str, str],
    folder: OrbaxFolder,
    *,
    stacked: bool,
) -> list[tuple[StoredParameter, int | None, ArrayPlace]]:
    """Return the stored parameters of a model.

    Raises:
        CheckpointError: an array of the model is absent, or there are others.
    """
    tied = getattr(config, "tie_word_embeddings", False)
    places = [
        found
        for found in list_places(family, config, stacked=stacked)
        if found[2].array in names or not (tied and found[0].hf == "lm_head.weight")
    ]
    required = dict.fromkeys(place.array for _, _, place in places)
    problems = [
        (kind, sorted(group))
        for kind, group in (
            ("lacks", required.keys() - names.keys()),
            ("has further arrays", names.keys() - required.keys()),
        )
        if group
    ]
    if problems:
        text = "; ".join(
            f"{kind} ({len(group)}): {', '.join(group[:5])}" for kind, group in problems
        )
        raise CheckpointError(
            f"{folder.path} does not fit {family.program}'s layout of a {config.model_type} with "
            f"{config.num_hidden_layers} layers and tie_word_embeddings={str(tied).lower()}: it "
            f"{text}. Compare config.json with the checkpoint"
        )
    return places


class _Reader:
    """Reads tensors of Hugging Face's layout; the last arrays stay in memory, because the layers
    of a stack are read one after another."""

    def __init__(self, config: ArchitectureFields):
        self._config = config
        self._kept: dict[str, np.ndarray] = {}
        self._formats = {dtype: name for name, dtype in DTYPES.items()}

    def relate(
        self, array: OrbaxArray, part: StoredParameter, layer: int | None, place: ArrayPlace
    ) -> Iterator[tuple[str, Computed]]:
        """Yield the tensors of one layer in an array: one, or one for each expert."""
        shape, axis = self._remove_layers(array, place)
        count = shape[0] if part.is_expert and shape else 1
        shape = shape[1:] if part.is_expert else shape
        axes = (part.inputs + 1 if part.inputs else 1) + (part.entry is not None)
        if len(shape) < axes or count > _MAX_EXPERTS:
            raise CheckpointError(
                f"{array.folder}: the array {array.name} has the shape {list(array.shape)}, "
                f"which does not fit {part.hf}: compare {MODEL_CONFIG} with the checkpoint"
            )
        hf_shape = get_tensor_shape(shape, part)
        rows = self._get_rows(part, hf_shape)
        if rows != hf_shape[0]:
            once(
                logger,
                f"{array.folder}: {array.name} has {hf_shape[0]} rows and the vocabulary {rows}: "
                f"rows are {'omitted' if rows < hf_shape[0] else 'added as zeros'} at the end",
            )
            hf_shape = (rows, *hf_shape[1:])
        dtype = np.dtype(np.float32) if part.has_other_values else array.dtype
        size = dtype.itemsize * math.prod(hf_shape)
        entry = TensorEntry(array.folder / ORBAX_METADATA, self._formats[dtype], hf_shape, 0, size)
        for expert in range(count):
            at = (expert,) if part.is_expert else ()
            name = part.hf.format(layer=layer, expert=expert)
            yield name, Computed(entry, self._build_read(array, part, place, axis, at, hf_shape))

    def _build_read(
        self,
        array: OrbaxArray,
        part: StoredParameter,
        place: ArrayPlace,
        axis: int,
        at: tuple[int, ...],
        shape: Shape,
    ) -> Callable[[Index], np.ndarray]:
        def read(index: Index) -> np.ndarray:
            values = self._read_array(array)
            if place.entry is not None:
                values = values[(slice(None),) * axis + (place.entry,)]
            values = convert_to_tensor(values[at], part, self._config)
            missing_rows = shape[0] - values.shape[0]
            if missing_rows > 0:
                zeros = np.zeros((missing_rows, *values.shape[1:]), values.dtype)
                values = np.concatenate([values, zeros])
            return values[: shape[0]][index]

        return read

    def _read_array(self, array: OrbaxArray) -> np.ndarray:
        if array.name not in self._kept:
            values = array.read()
            kept_bytes = sum(kept.nbytes for kept in self._kept.values())
            while self._kept and kept_bytes + values.nbytes > _KEPT:
                kept_bytes -= self._kept.pop(next(iter(self._kept))).nbytes
            self._kept[array.name] = values
        return self._kept[array.name]

    def _remove_layers(self, array: OrbaxArray, place: ArrayPlace) -> tuple[Shape, int]:
        """Return the shape of one layer, and the axis of the layers (`param_scan_axis`)."""
        if place.entry is None:
            return array.shape, 0
        for axis in (1, 0):
            if array.shape[axis : axis + 1] == (place.layers,):
                return (*array.shape[:axis], *array.shape[axis + 1 :]), axis
        raise CheckpointError(
            f"{array.folder}: the array {array.name} has the shape {list(array.shape)}, and neither"
            f" its first nor its second axis has the {place.layers} layers of {MODEL_CONFIG}"
        )

    def _get_rows(self, part: StoredParameter, shape: Shape) -> int:
        """Return the number of rows in Hugging Face's layout."""
        vocabulary = self._config.vocab_size
        fits = part.has_rows and (shape[0] > vocabulary or shape[0] == MAXTEXT_ROWS.get(vocabulary))
        return vocabulary if fits else shape[0]
