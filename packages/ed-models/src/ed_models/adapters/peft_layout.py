"""The location of our matrices in the modules of transformers, to which PEFT adds adapters.

A matrix of theirs may be several of ours (queries, keys and values in one; the gate and the up
projection of all experts in one), and the other way round its blocks may alternate; the family's
`WEIGHTS` define the relation, for adapters and for weights. Two things differ from a checkpoint,
because PEFT goes by modules in memory: modules may have other names there (`MODULES` of the
family), and the experts of a layer are two parameters of one module, however many tensors a
checkpoint has.

PEFT puts one wrapper round the other for the parameters of a module. The last one, `down_proj`, is
the outer one; that of `gate_up_proj` is called `base_layer` then. Theirs are A [e * r, i], and B
[o, r * e] with the experts running fastest.

Legend: i in features, o out features, r rank, e experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_layers.lora.layers import ADAPTED
from ed_layers.projections.linear import ExpertLinear
from flax import nnx

from ed_models.adapters.saved_modules import build_weight_map
from ed_models.adapters.values import LayerAdapter
from ed_models.checkpoints.text_halves import text_name
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.blocks import Piece, Shape
from ed_models.weights.rules import renamer, split, transpose

Rename = Callable[[str], str]

#: How often a name is renamed: an old name may lead to another one.
_RENAMES = 3
#: Parameters of a module of experts, from the inner wrapper to the outer one.
EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Modules:
    """The differences between transformers' modules and the checkpoints of a family.

    Attributes:
        names: parts of a checkpoint name -> parts of a module name; see
            `ed_models.weights.rules.renamed`.
        separate: last parts of the name of a checkpoint matrix -> those of the modules that share
            the matrix, in the order of their rows.
        halves: last parts of modules of `separate` whose rows have another order: of each head
            first the even rows of the checkpoint, and then the odd ones.
        halved_heads: number of heads of these modules, from the configuration of the model.
        swapped: PEFT swaps the inputs and outputs of experts (Llama 4, whose parameters are [e, i,
        o]
            without a marker).
    """

    names: Mapping[str, str] = field(default_factory=dict)
    separate: Mapping[str, Sequence[str]] = field(default_factory=dict)
    halves: Sequence[str] = ()
    halved_heads: Callable[[Any], int] = lambda config: config.num_attention_heads
    swapped: bool = False


@dataclass(frozen=True)
class Matrix:
    """One matrix of transformers' model, or one of each expert.

    Attributes:
        module: name of the module of torch.
        parameter: of a module of experts; None if the module is the layer.
        shape: [x, y] in transformers, of one expert.
        experts: e; None for a single matrix.
        pieces: the blocks that the matrix shares with ours, in two dimensions.
        swapped: see `Modules`.
    """

    module: str
    parameter: str | None
    shape: Shape
    experts: int | None
    pieces: Sequence[Piece]
    swapped: bool = False

    @property
    def name(self) -> str:
        """The name in the settings of an adapter."""
        return self.module if self.parameter is None else f"{self.module}.{self.parameter}"

    @property
    def is_embedding(self) -> bool:
        """Whether the matrix is a table [v, d]."""
        return self.pieces[0].ours.endswith(".embedding")

    @property
    def sizes(self) -> tuple[int, int]:
        """(inputs, outputs): (v, d) of an embedding."""
        x, y = self.shape
        return (x, y) if self.is_embedding or self.pieces[0].perm == (0, 1) else (y, x)

    def outputs(self, piece: Piece) -> slice:
        """Return the outputs of their matrix that a block of ours contains."""
        inputs = self.sizes[0]
        if len(piece.hf_region[piece.perm[0]]) != inputs:
            raise ConfigError(
                f"{piece.ours!r} is a part of {self.name!r} without all of its inputs; "
                "PEFT's layout has no place for its adapter"
            )
        return as_slice(piece.hf_region[piece.perm[1]])


def get_modules(model: object) -> Modules:
    """Return the names of the modules of a model; a body alone has those of its family."""
    family = getattr(type(model), "head_class", None)
    return getattr(type(model), "MODULES", getattr(family, "MODULES", Modules()))


def find_matrices(model: Any) -> dict[str, Matrix]:
    """Return the matrices of transformers' model that can have adapters, by name."""
    weights = build_weight_map(model)
    modules = get_modules(model)
    rename = renamer(modules.names)
    kinds = {
        name: kind
        for path, node in nnx.iter_modules(model)
        for kind in ADAPTED
        if isinstance(node, kind)
        for name in parameter_names.canonical(parameter_names.normalize_parameter_name(path))
    }
    experts = [name for name, kind in kinds.items() if kind is ExpertLinear]
    matrices = {m.name: m for m in _expert_matrices(experts, weights, modules, rename)}
    for theirs, pieces in weights.by_hf.items():
        kind = kinds.get(pieces[0].ours.rpartition(".")[0])
        if kind not in (None, ExpertLinear) and theirs.endswith(".weight"):
            stored = theirs.removesuffix(".weight")
            shared = next((end for end in modules.separate if stored.endswith(f".{end}")), None)
            if shared is not None:
                parent = rename(stored.removesuffix(shared))
                matrices |= _separate(weights, theirs, parent, modules, shared)
                continue
            name = rename(stored)
            matrices[name] = Matrix(name, None, weights.hf_shapes[theirs], None, pieces)
    return matrices


def _separate(
    weights: WeightMap, tensor: str, parent: str, modules: Modules, shared: str
) -> dict[str, Matrix]:
    """Return the matrices of modules that share one tensor of a checkpoint."""
    ours = dict.fromkeys(piece.ours for piece in weights.by_hf[tensor])
    matrices = {}
    for name, part in zip(ours, modules.separate[shared], strict=True):
        relation = transpose({name: weights.shapes[name]}, lambda: "", None)
        ((shape),) = relation.hf_shapes.values()
        pieces: Sequence[Piece] = relation.pieces
        if part in modules.halves:
            pieces = _halve_heads(pieces[0], modules.halved_heads(weights.config))
        module = f"{parent.rstrip('.')}.{part}"
        matrices[module] = Matrix(module, None, shape, None, pieces)
    return matrices


def _halve_heads(piece: Piece, heads: int) -> list[Piece]:
    """Split a transposed matrix [i, o] into the even and the odd outputs of each head."""
    inputs, outputs = piece.our_region
    assert isinstance(inputs, range)
    assert isinstance(outputs, range)
    size = len(outputs) // heads
    return [
        replace(
            piece,
            our_region=(inputs, range(head * size + odd, (head + 1) * size, 2)),
            hf_region=(range(start, start + size // 2), inputs),
        )
        for head in range(heads)
        for odd in range(2)
        for start in [head * size + odd * (size // 2)]
    ]


def find_module(model: object, name: str, modules: Container[str]) -> str:
    """Return the name in transformers 5 of a module of an adapter; unknown names are unchanged.

    Adapters of earlier releases have the names of checkpoints, and adapters of a multimodal model
    may belong to its text model or its tower, which is loaded alone.

    Args:
        model: the model that reads the adapter.
        name: name of the module in the file.
        modules: the names of the modules in transformers 5.
    """
    if name in modules:
        return name
    cls = type(model)
    to_module = renamer(get_modules(model).names)
    to_stored = renamer(getattr(cls, "OTHER_NAMES", {}))
    candidates = [name]
    for tower in getattr(cls, "TOWER_NAMES", ()):
        if name.startswith(f"{tower}."):
            candidates.append(name.removeprefix(f"{tower}."))
    if (text := text_name(name)) is not None:
        candidates.append(text)
    for candidate in candidates:
        for _ in range(_RENAMES):
            if candidate in modules:
                return candidate
            if (module := to_module(candidate)) in modules:
                return module
            candidate = to_stored(candidate)
    return name


def _expert_matrices(
    layers: Sequence[str], weights: WeightMap, modules: Modules, rename: Rename
) -> list[Matrix]:
    matrices: list[Matrix] = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        expert_shapes = {
            name: weights.shapes[name]
            for layer in ("gate_proj", "up_proj", "down_proj")
            if (name := f"{parent}.{layer}.kernel") in weights.shapes
        }
        first = weights.by_ours[next(iter(expert_shapes))][0]
        if isinstance(first.our_region[0], range):
            tensors = dict.fromkeys(weights.by_ours[name][0].hf for name in expert_shapes)
            matrices += [
                _build_tensor_matrix(weights, tensor, modules, rename) for tensor in tensors
            ]
        elif first_match := re.fullmatch(r"(.*)\.0\.\w+\.weight", first.hf):
            matrices += _build_fused_matrices(expert_shapes, rename(first_match[1]))
    return matrices


def _build_tensor_matrix(
    weights: WeightMap, tensor: str, modules: Modules, rename: Rename
) -> Matrix:
    """Return the matrix of a parameter with the same shape in checkpoint and module."""
    name = rename(tensor.removesuffix(".weight"))
    module, _, parameter = name.rpartition(".")
    flat = [
        replace(
            p,
            our_region=p.our_region[1:],
            hf_region=p.hf_region[1:],
            perm=tuple(dim - 1 for dim in p.perm[1:]),
        )
        for p in weights.by_hf[tensor]
    ]
    experts, *shape = weights.hf_shapes[tensor]
    return Matrix(module, parameter, tuple(shape), experts, flat, modules.swapped)


def _build_fused_matrices(expert_shapes: Mapping[str, Shape], module: str) -> list[Matrix]:
    """Return the matrices of experts with separate tensors; the module fuses gate and up."""
    down = [name for name in expert_shapes if name.endswith(".down_proj.kernel")]
    up_names = [name for name in expert_shapes if name not in down]
    matrices = []
    for parameter, names in (
        ("gate_up_proj" if len(up_names) > 1 else "up_proj", up_names),
        ("down_proj", down),
    ):
        shapes = {name: expert_shapes[name][1:] for name in names}
        layout = split(-2, transpose)(shapes, parameter.format, None)
        ((shape),) = layout.hf_shapes.values()
        matrices.append(Matrix(module, parameter, shape, expert_shapes[names[0]][0], layout.pieces))
    return matrices


# Ours -> theirs, and back.


def merge_adapters(
    matrix: Matrix, adapter: Mapping[str, LayerAdapter]
) -> tuple[LoraSpec, LayerAdapter]:
    """Combine our adapters into one adapter of their matrix.

    If our adapters share A, the result has this A. Otherwise the A are concatenated, and the ranks
    are added. The scale is one number, so alpha grows with the rank.
    """
    sources = list(dict.fromkeys(p.ours for p in matrix.pieces if p.ours in adapter))
    parts = [adapter[name] for name in sources]
    shared = all(np.array_equal(part.a, parts[0].a) for part in parts)
    ranks = [part.spec.rank for part in parts]
    rank = ranks[0] if shared else sum(ranks)
    starts = [0] * len(parts) if shared else [sum(ranks[:i]) for i in range(len(parts))]
    spec = parts[0].spec
    spec = replace(spec, rank=rank, alpha=spec.scale * (rank**0.5 if spec.rslora else rank))
    leading = () if matrix.experts is None else (matrix.experts,)
    if matrix.is_embedding:
        a = np.zeros((matrix.shape[0], rank), np.float32)
        for piece in matrix.pieces:
            a[as_slice(piece.hf_region[0])] = parts[0].a[as_slice(piece.our_region[0])]
        return spec, LayerAdapter(spec, a, parts[0].b)
    outputs = matrix.sizes[1]
    a = parts[0].a if shared else np.concatenate([part.a for part in parts], axis=-1)
    b = np.zeros((*leading, rank, outputs), np.float32)
    magnitude = np.zeros(outputs, np.float32) if spec.dora else None
    covered = {p.ours for p in matrix.pieces}
    if spec.dora and len(sources) < len(covered):
        raise ConfigError(f"{matrix.name!r} has parts without an adapter; dora needs all of them")
    for piece in matrix.pieces:
        if piece.ours not in adapter:
            continue
        at = sources.index(piece.ours)
        theirs, ours = matrix.outputs(piece), as_slice(piece.our_region[1])
        b[..., starts[at] : starts[at] + ranks[at], theirs] = parts[at].b[..., ours]
        learned = parts[at].magnitude
        if magnitude is not None and learned is not None:
            magnitude[theirs] = learned[ours]
    return spec, LayerAdapter(spec, a, b, magnitude)


def split_adapter(
    matrix: Matrix, adapter: LayerAdapter, shapes: Mapping[str, Shape]
) -> dict[str, LayerAdapter]:
    """Split an adapter of their matrix into adapters of our matrices, which share A."""
    parts: dict[str, LayerAdapter] = {}
    for piece in matrix.pieces:
        if matrix.is_embedding:
            rows = np.zeros((shapes[piece.ours][0], adapter.spec.rank), np.float32)
            part = parts.setdefault(piece.ours, LayerAdapter(adapter.spec, rows, adapter.b))
            part.a[as_slice(piece.our_region[0])] = adapter.a[as_slice(piece.hf_region[0])]
            continue
        theirs, ours = matrix.outputs(piece), as_slice(piece.our_region[1])
        if piece.ours not in parts:
            columns = shapes[piece.ours][-1]
            empty = np.zeros((*adapter.b.shape[:-1], columns), np.float32)
            lengths = None if adapter.magnitude is None else np.zeros(columns, np.float32)
            parts[piece.ours] = LayerAdapter(adapter.spec, adapter.a, empty, lengths)
        part = parts[piece.ours]
        part.b[..., ours] = adapter.b[..., theirs]
        if part.magnitude is not None and adapter.magnitude is not None:
            part.magnitude[ours] = adapter.magnitude[theirs]
    return parts


def convert_to_peft(matrix: Matrix, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert our a [*e, i, r] and b [*e, r, o] to PEFT's A and B."""
    if matrix.swapped:
        a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
    a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)  # [*e, r, i], [*e, o, r]
    if matrix.experts is not None:
        a, b = a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


def convert_from_peft(
    matrix: Matrix, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Convert PEFT's A and B to ours; None if the shapes do not match the matrix."""
    inputs, outputs = matrix.sizes[::-1] if matrix.swapped else matrix.sizes
    e = matrix.experts or 1
    fits = (a.ndim, b.ndim) == (2, 2) and (b.shape[0], a.shape[1]) == (outputs, inputs)
    if not fits or a.shape[0] != b.shape[1] or not a.shape[0] or a.shape[0] % e:
        return None
    if matrix.experts is not None:
        a = a.reshape(e, -1, inputs)
        b = b.reshape(outputs, -1, e).transpose(2, 0, 1)
    a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    return (b.swapaxes(-1, -2), a.swapaxes(-1, -2)) if matrix.swapped else (a, b)


def as_slice(positions: Any) -> slice:
    """Return the positions of one dimension of a block as a slice."""
    return slice(positions.start, positions.stop, positions.step)
