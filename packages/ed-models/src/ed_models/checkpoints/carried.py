"""Carried tensors: parts of a checkpoint that a model does not compute, and that are not lost.

A model for text reads the language model of a multimodal checkpoint, and no family reads the layers
that predict further tokens (MTP). Such tensors stay in their files: loading stores only their
names, formats and shapes (`find_carried`), and saving copies their bytes, one tensor at a time,
between the tensors of the model. The text half of a multimodal checkpoint also becomes a multimodal
checkpoint again: its tensors get the prefix that they have in the files, and its settings replace
the `text_config` of the file's `config.json`.

A file that is absent or has changed since the model was loaded raises an error. Size and time of
the file are compared; a record that a checkpoint of a run contains also has a SHA-256 of the bytes,
so that copied files are accepted.

The bytes of a packed checkpoint are decoded as the tensors of the model are, because the settings
of a saved checkpoint describe plain numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.frozen import thaw
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_infra.logging import get_logger, once

from ed_models.checkpoints.leftovers import is_copied
from ed_models.checkpoints.packed_tensors import read_plain_tensors
from ed_models.checkpoints.pickled_files import read_pickled
from ed_models.checkpoints.tensor_files import DTYPES, Index, TensorEntry, TensorFiles, read_header
from ed_models.checkpoints.tensor_writer import TensorSpec
from ed_models.checkpoints.text_halves import (
    CONDITIONAL,
    TASK_ENDINGS,
    count_text_prefixes,
    restore_text_half,
)
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.blocks import Shapes

logger = get_logger(__name__)
#: Tasks of classes that generate text; a checkpoint of one is a checkpoint of the others.
_GENERATIVE = frozenset(
    {
        TaskType.CAUSAL_LM,
        TaskType.IMAGE_TEXT_TO_TEXT,
        TaskType.ANY_TO_ANY,
        TaskType.SEQUENCE_TO_SEQUENCE,
        TaskType.SPEECH_SEQUENCE_TO_SEQUENCE,
    }
)
_WAY_OUT = (
    "restore the files, or load the model again from the present directory; "
    "save_pretrained(..., whole=False) writes only the tensors that the model computes with"
)


class CarriedTensor(NamedTuple):
    """A tensor that is copied: its name and format, and the name of its file.

    A tensor that is decoded from several others has the file `""`.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    file: str


class FileStamp(NamedTuple):
    """Name, size and time of a file, by which a change is recognized."""

    file: str
    size: int
    time: int


@dataclass(frozen=True)
class CarriedTensors:
    """The tensors and settings of a checkpoint that a model does not contain.

    Attributes:
        directory: the directory of the checkpoint.
        tensors: the tensors that are copied.
        stamps: the files that contain them.
        packing: `quantization_config` of packed tensors as JSON; None = plain tensors.
        prefixes: (prefix in a text-only checkpoint, prefix in these files) of a text half.
        settings: content of config.json; None = there is no such file.
        is_text_half: whether the model is the text half of the checkpoint.
        joined: names and shapes of stored tensors that are several tensors of the model.
        sha256: of the names and bytes of the tensors; None = not computed.
    """

    directory: str
    tensors: tuple[CarriedTensor, ...]
    stamps: tuple[FileStamp, ...] = ()
    packing: str | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    settings: str | None = None
    is_text_half: bool = False
    joined: tuple[tuple[str, tuple[int, ...]], ...] = ()
    sha256: str | None = field(default=None, compare=False)

    def restore_name(self, name: str) -> str:
        """Return the name of a model's tensor in the checkpoint."""
        for text_prefix, prefix in self.prefixes:
            if name.startswith(text_prefix):
                return prefix + name.removeprefix(text_prefix)
        return name

    def restore_settings(
        self, settings: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the content of config.json of the checkpoint with a changed model.

        Args:
            settings: content of config.json of the model.
            fields: all fields of the model, those with default values too.
        """
        stored = json.loads(self.settings or "{}")
        if self.is_text_half:
            return restore_text_half(stored, settings, fields)
        # A family keeps no settings of towers that it does not compute.
        towers = {name: value for name, value in stored.items() if name.endswith("_config")}
        towers.pop("quantization_config", None)
        return {**towers, **{n: value for n, value in settings.items() if value is not None}}

    def place_parts(self, cls: type, shapes: Shapes) -> dict[str, dict[str, Index]]:
        """Return the tensors of a model in each stored tensor, with their places in it.

        A stored tensor that they do not fill, because some are quantized, is omitted.

        Args:
            cls: the class of the model.
            shapes: the tensors of the model.
        """
        joined, groups = dict(self.joined), defaultdict[str, dict[str, Index]](dict)
        if joined:
            for part, (name, index) in cast(Any, cls).locate_parts(shapes, joined).items():
                groups[name][part] = index
        return {
            name: group
            for name, group in groups.items()
            if sum(math.prod(shapes[part]) for part in group) == math.prod(joined[name])
        }

    def list_specs(self, written: Collection[str] = ()) -> dict[str, TensorSpec]:
        """Return the copied tensors, without those that the model writes itself."""
        return {
            t.name: TensorSpec(t.shape, DTYPES[t.format], t.format)
            for t in self.tensors
            if t.name not in written
        }

    def open_files(self) -> TensorFiles:
        """Return the tensors, after a check of the files.

        Raises:
            CheckpointError: a file is absent, or has changed since the model was loaded.
        """
        directory = Path(self.directory)
        absent = [stamp.file for stamp in self.stamps if not (directory / stamp.file).is_file()]
        if absent:
            raise CheckpointError(
                f"{len(self.tensors)} tensors that the model does not compute with are copied from "
                f"{directory}, and {absent[0]} is not there any more: {_WAY_OUT}"
            )
        changed = [stamp.file for stamp in self.stamps if _stamp(directory / stamp.file) != stamp]
        if not changed:
            return self._read_headers()
        # The bytes decide: a copy of the same files has other times.
        error = CheckpointError(
            f"{directory / changed[0]} has changed since the model was loaded, and "
            f"{len(self.tensors)} tensors that the model does not compute with are copied from "
            f"there: {_WAY_OUT}"
        )
        if self.sha256 is None:
            raise error
        files = self._read_headers()
        if _hash(self, files) != self.sha256:
            raise error
        return files

    def _read_headers(self) -> TensorFiles:
        directory = Path(self.directory)
        headers = {s.file: _read_locations(directory / s.file) for s in self.stamps}
        if self.packing is None:
            entries = {t.name: headers[t.file].get(t.name) for t in self.tensors}
            files = TensorFiles({name: entry for name, entry in entries.items() if entry})
        else:
            joined = {name: entry for header in headers.values() for name, entry in header.items()}
            files = read_plain_tensors(TensorFiles(joined), json.loads(self.packing))
        for tensor in self.tensors:
            entry = files.get(tensor.name)
            if entry is None or (entry.format, entry.shape) != (tensor.format, tensor.shape):
                raise CheckpointError(
                    f"{directory} has no tensor {tensor.name} of {tensor.format} "
                    f"{list(tensor.shape)} any more: {_WAY_OUT}"
                )
        return files

    def to_reference(self) -> dict[str, object]:
        """Return a record of JSON values, with a hash of the bytes."""
        return {**asdict(self), "sha256": self.sha256 or _hash_once(self)}

    @classmethod
    def from_reference(cls, reference: Mapping[str, object]) -> CarriedTensors:
        """Return the record that `to_reference` wrote."""
        fields = dict(reference)
        rows = cast(Mapping[str, list[list]], reference)
        tensors = [(name, kind, tuple(shape), file) for name, kind, shape, file in rows["tensors"]]
        return cls(
            **cast(
                dict,
                fields
                | {
                    "tensors": tuple(CarriedTensor(*row) for row in tensors),
                    "stamps": tuple(FileStamp(*row) for row in rows["stamps"]),
                    "prefixes": tuple((text, prefix) for text, prefix in rows["prefixes"]),
                    "joined": tuple((name, tuple(shape)) for name, shape in rows["joined"]),
                },
            )
        )

    def move_to(self, directory: Path) -> CarriedTensors:
        """Return the record of the same tensors in a directory that was written with them."""
        files = TensorFiles.open(directory)
        tensors = tuple(t._replace(file=files[t.name].file.name) for t in self.tensors)
        settings = (directory / "config.json").read_text() if self.settings else None
        return replace(
            self,
            directory=str(directory),
            tensors=tensors,
            stamps=_stamp_files(directory, {t.file for t in tensors}),
            packing=None,
            settings=settings,
        )


def find_carried(
    cls: type,
    config: EasyDeLBaseConfig,
    plain_files: TensorFiles,
    text_files: TensorFiles,
    published_files: TensorFiles,
    model_files: TensorFiles,
    weights: WeightMap,
) -> CarriedTensors | None:
    """Return the further tensors and settings of a checkpoint; None = there are none.

    Args:
        cls, config: the class and the configuration of the model; `quantization_config` describes
            the packing of the files.
        plain_files: the unpacked tensors under the names of the files.
        text_files: the same without the tensors outside of the language model.
        published_files: the same under the names of the model. A renamed tensor has the same entry.
        model_files: the same with the tensors that the model has in the place of joined ones.
        weights: the tensors of the model.
    """
    directory = plain_files.directory
    text_entries = {id(entry) for entry in text_files.values()}
    names = {id(entry): name for name, entry in plain_files.items()}
    copied = [name for entry, name in names.items() if entry not in text_entries]
    copied += [
        names[id(entry)]
        for name, entry in model_files.items()
        if id(entry) in names and name not in weights.hf_shapes and is_copied(weights, name)
    ]
    path = directory / "config.json"
    settings = path.read_text(encoding="utf-8") if path.is_file() else None
    is_half = settings is not None and _is_text_half(json.loads(settings), config)
    parts = {name: shape for name, shape in weights.hf_shapes.items() if name in model_files}
    joined = _find_joined(cls, parts, published_files, model_files)
    if not copied and not is_half and not joined:
        return None
    if not _has_same_task(cls, config):
        if copied:
            once(
                logger,
                f"{directory}: {cls.__name__} has another task than the checkpoint, so "
                f"{len(copied)} tensors ({min(copied)}, …) are neither read nor written",
            )
        return None
    is_packed = type(plain_files) is not TensorFiles
    tensors = tuple(
        CarriedTensor(name, entry.format, entry.shape, "" if is_packed else entry.file.name)
        for name, entry in ((name, plain_files[name]) for name in sorted(copied))
    )
    files = {entry.file.name for entry in plain_files.values() if entry.file.is_file()}
    return CarriedTensors(
        str(directory),
        tensors,
        _stamp_files(directory, files if is_packed and tensors else {t.file for t in tensors}),
        json.dumps(thaw(config.quantization_config)) if is_packed else None,
        count_text_prefixes(plain_files) if is_half else (),
        settings,
        is_half,
        joined,
    )


def _find_joined(
    cls: type, shapes: Shapes, published_files: TensorFiles, model_files: TensorFiles
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the stored tensors that a class separates into several tensors."""
    locate = getattr(cls, "locate_parts", None)
    if locate is None:
        return ()
    gone = {n: entry.shape for n, entry in published_files.items() if n not in model_files}
    names = {name for name, _ in locate(shapes, gone).values()}
    return tuple((name, gone[name]) for name in sorted(names))


def _is_text_half(stored: Mapping[str, object], config: EasyDeLBaseConfig) -> bool:
    """Return whether a config.json is that of a multimodal model, of which a model is a part."""
    model_type = str(stored.get("model_type"))
    is_other = model_type != config.model_type and (
        model_type not in registry.model_types()
        or registry.get_config(model_type) is not type(config)
    )
    return is_other and isinstance(stored.get("text_config"), dict)


def _has_same_task(cls: type, config: EasyDeLBaseConfig) -> bool:
    """Return whether a class has the task of the class that a checkpoint names."""
    task = getattr(cls, "model_task", None)
    architectures = getattr(config, "architectures", None) or ()
    tasks = [
        TaskType.CAUSAL_LM if str(name).endswith(CONDITIONAL) else TASK_ENDINGS[ending]
        for name in architectures
        for ending in (CONDITIONAL, *TASK_ENDINGS)
        if str(name).endswith(ending)
    ][:1]
    return all(task == one or {task, one} <= _GENERATIVE for one in tasks)


def _read_locations(file: Path) -> Mapping[str, TensorEntry]:
    """Return the tensors of a file of `transformers`, in safetensors or torch's format."""
    return read_header(file) if file.suffix == ".safetensors" else read_pickled(file)


def _stamp(path: Path) -> FileStamp:
    stat = path.stat()
    return FileStamp(path.name, stat.st_size, stat.st_mtime_ns)


def _stamp_files(directory: Path, names: Collection[str]) -> tuple[FileStamp, ...]:
    return tuple(_stamp(directory / name) for name in sorted(names))


@lru_cache(maxsize=8)
def _hash_once(carried: CarriedTensors) -> str:
    """Return the hash of the tensors; a record of changed files has other stamps."""
    return _hash(carried, carried.open_files())


def _hash(carried: CarriedTensors, files: TensorFiles) -> str:
    digest = hashlib.sha256()
    for tensor in carried.tensors:
        digest.update(json.dumps([tensor.name, tensor.format, tensor.shape]).encode())
        digest.update(files.read_bytes(tensor.name).data)
    return digest.hexdigest()
