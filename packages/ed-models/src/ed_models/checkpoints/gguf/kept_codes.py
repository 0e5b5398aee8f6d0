"""Models whose matrices keep the codes of a GGUF file.

Each selected matrix becomes tensors of this project's own layout (`….kernel.codes`,
`….kernel.scale`, `….kernel.zero`), which are read from the blocks of the file. So the loader reads
a GGUF file like a checkpoint with quantized matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.rules import Rules
from ed_infra.specs import KEPT_CODES, EasyDeLQuantizationConfig
from ed_layers.projections.embed import Embed
from ed_layers.quantization.model import MATRICES, QuantizationRules, get_matrix, to_rules
from flax import nnx

from ed_models.checkpoints.gguf.blocks import map_file, raw_blocks
from ed_models.checkpoints.gguf.codes import CodeForm, common_form, part_of_blocks
from ed_models.checkpoints.gguf.files import GgufFiles
from ed_models.checkpoints.gguf.header import GgufHeader
from ed_models.checkpoints.quantized_tensors import build_patterns
from ed_models.checkpoints.tensor_files import Computed, Index, TensorEntry, TensorFiles
from ed_models.checkpoints.weight_map import WeightMap, fill_window, get_index_ranges
from ed_models.weights.blocks import Piece, Shape

StoredRules = Rules[EasyDeLQuantizationConfig | None]


@dataclass(frozen=True)
class _Matrix:
    """A matrix of ours in the blocks of tensors of a file.

    Attributes:
        name: canonical name of the matrix.
        pieces: its blocks.
        shape: its shape.
        axis: axis of the groups: -2, or -1 of a table of embeddings.
        form: its arrays.
        spec: the rule that selected the matrix.
    """

    name: str
    pieces: Sequence[Piece]
    shape: Shape
    axis: int
    form: CodeForm
    spec: EasyDeLQuantizationConfig

    @property
    def stored(self) -> EasyDeLQuantizationConfig:
        """The configuration of the stored matrix."""
        form, shifted = self.form, self.form.zero == "float32"
        eight_bits = self.spec.quantizes_activations and not shifted
        dtype = ("w4a8" if form.small else "w8a8") if eight_bits else form.format
        return EasyDeLQuantizationConfig(dtype=dtype, group_size=form.group, float_zero=shifted)

    def tensors(
        self, header: GgufHeader, data: Callable[[Path], np.ndarray]
    ) -> Iterator[tuple[str, Computed]]:
        """Yield the arrays of the matrix as tensors that are read from the file.

        Args:
            header: of the file.
            data: path of a file -> its bytes.
        """
        location = header.tensors[self.pieces[0].hf]
        file = header.get_file(self.pieces[0].hf)
        kinds = {"codes": "U8" if self.form.small else "I8", "scale": "F32"}
        if self.form.zero is not None:
            kinds["zero"] = "U8" if self.form.zero == "uint8" else "F32"
        for part, kind in kinds.items():
            shape = list(self.shape)
            shape[self.axis] //= self.per(part)
            entry = TensorEntry(file, kind, tuple(shape), location.start, location.stop)
            read = partial(self._read, header, data, part, entry)
            yield f"{self.name}.{part}", Computed(entry, read)

    def per(self, part: str) -> int:
        """Return the number of codes of an entry of an array."""
        return (2 if self.form.small else 1) if part == "codes" else self.form.group

    def _read(
        self,
        header: GgufHeader,
        data: Callable[[Path], np.ndarray],
        part: str,
        entry: TensorEntry,
        index: Index,
    ) -> np.ndarray:
        trailing_slices = (slice(None),) * (len(entry.shape) - len(index))
        ranges = [slice(i, i + 1) if isinstance(i, int) else i for i in index]
        window = get_index_ranges([*ranges, *trailing_slices], entry.shape)
        out = np.empty([len(positions) for positions in window], entry.dtype)

        def read(tensor: str, source: Index) -> np.ndarray:
            *rows, along = source
            location = header.tensors[tensor]
            blocks = raw_blocks(data(header.get_file(tensor)), location)[tuple(rows)]
            blocks = np.ascontiguousarray(blocks)
            return part_of_blocks(blocks, location.format, self.form, part)[..., along]

        for _ in fill_window(self._get_pieces(part), window, read, out):
            pass
        return out[tuple(0 if isinstance(i, int) else slice(None) for i in index)]

    def _get_pieces(self, part: str) -> Iterator[Piece]:
        """Yield the blocks of an array: fewer entries along the axis of the groups."""
        for piece in self.pieces:
            ours, theirs = list(piece.our_region), list(piece.hf_region)
            ours[self.axis] = range(self.shape[self.axis] // self.per(part))
            theirs[-1] = range(len(theirs[-1]) // self.per(part))
            yield replace(piece, our_region=tuple(ours), hf_region=tuple(theirs))


@dataclass(frozen=True)
class KeptCodes:
    """Rules that keep the codes of a file.

    Attributes:
        gguf: the file.
        rules: selection of the matrices.
    """

    gguf: GgufFiles
    rules: StoredRules

    def files_and_rules(
        self, files: TensorFiles, graphdef: nnx.GraphDef, state: nnx.State, weights: WeightMap
    ) -> tuple[TensorFiles, StoredRules | None]:
        """Return files with the codes of the selected matrices, and the rules of the quantized
        model; None if no matrix has codes.

        Matrices without codes in the file, such as float16 ones, remain plain.

        Args:
            files: the tensors of the file under the names of `weights`.
            graphdef, state: the model without quantized matrices and without values.
            weights: its tensors.
        """
        matrices: dict[str, _Matrix] = {}
        for name, is_table in _matrices(graphdef, state).items():
            match = self.rules.match(name.rpartition(".")[0])
            if match is None or match[1] is None:
                continue
            matrix = _build_matrix(self.gguf, files, weights, name, is_table, match[1])
            if matrix is not None:
                matrices[name] = matrix
        self.rules.check_used()
        _drop_mixed(matrices, weights)
        if not matrices:
            return files, None
        hidden = {piece.hf for matrix in matrices.values() for piece in matrix.pieces}
        header, data = self.gguf.header, cache(map_file)
        computed = dict(t for matrix in matrices.values() for t in matrix.tensors(header, data))
        modules: dict[EasyDeLQuantizationConfig, list[str]] = {}
        for name, matrix in matrices.items():
            modules.setdefault(matrix.stored, []).append(name.rpartition(".")[0])
        pairs = [(p, spec) for spec, names in modules.items() for p in build_patterns(names)]
        return files.rename_tensors(dict.fromkeys(hidden)).add_tensors(computed), to_rules(pairs)


def kept_codes(files: TensorFiles, rules: QuantizationRules | None) -> KeptCodes | None:
    """Return the rules of a model that keeps the codes of its file; None for other rules.

    Raises:
        ConfigError: some rules keep codes and others convert numbers, or there is no GGUF file.
    """
    if rules is None:
        return None
    pairs = to_rules(rules)
    formats: set[str] = set()
    pairs.map(lambda spec: None if spec is None else formats.add(spec.dtype))
    if formats.isdisjoint(KEPT_CODES):
        return None
    if not formats <= set(KEPT_CODES):
        raise ConfigError(
            f"quantization rules with {', '.join(sorted(formats))}: either the codes of a GGUF "
            f"file are kept ({', '.join(KEPT_CODES)}), or numbers are converted; use one kind"
        )
    if not isinstance(files, GgufFiles):
        raise ConfigError(
            f"quantization {formats.pop()} keeps the codes of a GGUF file, and {files.directory} "
            "is none: select another format"
        )
    return KeptCodes(files, pairs)


def _matrices(graphdef: nnx.GraphDef, state: nnx.State) -> dict[str, bool]:
    """Return the names of the matrices of a model, and whether rows of each are looked up."""
    with nnx.use_eager_sharding(False):
        model = nnx.merge(graphdef, state)
    return {
        name: isinstance(module, Embed)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, tuple(MATRICES))
        for name in parameter_names.canonical((*path, get_matrix(module)[0]))
    }


def _drop_mixed(matrices: dict[str, _Matrix], weights: WeightMap) -> None:
    """Remove matrices that share a tensor with a parameter that is not found."""
    while True:
        dense_tensors = {
            piece.hf
            for name, pieces in weights.by_ours.items()
            if name not in matrices
            for piece in pieces
        }
        mixed = [
            n for n, m in matrices.items() if any(piece.hf in dense_tensors for piece in m.pieces)
        ]
        if not mixed:
            return
        for name in mixed:
            del matrices[name]


def _build_matrix(
    gguf: GgufFiles,
    files: TensorFiles,
    weights: WeightMap,
    name: str,
    is_table: bool,
    spec: EasyDeLQuantizationConfig,
) -> _Matrix | None:
    """Return a matrix whose groups are whole groups of the tensors of the file, or None."""
    pieces, shape, header = weights.by_ours[name], weights.shapes[name], gguf.header
    axis = -1 if is_table else -2
    for piece in pieces:
        tensor = header.tensors.get(piece.hf)
        if tensor is None or files.get(piece.hf) != gguf[piece.hf] or gguf.changes(piece.hf):
            return None
        kept_axes = [d for d, region in enumerate(piece.our_region) if isinstance(region, range)]
        along = kept_axes[piece.perm.index(len(tensor.shape) - 1)]
        full_range = range(shape[axis])
        if (
            tensor.shape != weights.hf_shapes[piece.hf]
            or along != len(shape) + axis
            or piece.our_region[along] != full_range
            or piece.hf_region[-1] != full_range
        ):
            return None
    form = common_form({header.tensors[piece.hf].format for piece in pieces})
    return None if form is None else _Matrix(name, pieces, shape, axis, form, spec)
