"""The relation of our parameters to Hugging Face checkpoints: the rules of a `WEIGHTS` table.

A table is a sequence of rules `Rule(ours, theirs, layout)`, read in both directions. The first rule
whose pattern matches a parameter's canonical name applies. A name in braces matches one or more
parts of a dotted name. `STANDARD` is the table of a family that has Hugging Face's names and
torch's layout; other tables put their rules in front of it.

One tensor for one parameter:

    Rule("{path}.kernel", "{path}.weight", transpose)     [in, out] of [out, in], [e, in, out] too
    Rule("{path}.kernel", "{path}.weight", equal)         GPT-2's Conv1D, which is [in, out]
    Rule("{path}.conv1.kernel", "{path}.conv1.weight", permute(2, 1, 0))          [k, in, out]
    Rule("{path}.positions.embedding", "{path}.positions.weight", pad_axis(0, pad_before=2))
                                                          OPT: two rows that no position uses

Several parameters in one tensor, kernels and biases:

    *fused(("q_proj", "k_proj", "v_proj"), "qkv_proj")    Phi-3: all q, all k, all v
    *fused(("q_proj", "k_proj", "v_proj"), "c_attn", layout=equal)                GPT-2: the same
    *fused(("q_proj", "k_proj", "v_proj"), "query_key_value", groups="num_attention_heads")
                                                          GPT-NeoX: q, k, v of head 0, of head 1, …
    *fused(("q_proj", "k_proj", "v_proj"), "wqkv", groups="num_key_value_heads")
                                                          InternLM2: a group's queries, its k, its v
    Rule(("{path}.gate_proj.kernel", "{path}.up_proj.kernel"), "{path}.gate_up_proj",
         split(-1, equal))                                Llama 4: [e, in, gate and up]
    Rule(("{path}.gate_proj.kernel", "{path}.up_proj.kernel"), "{path}.gate_up_proj",
         interleave(-1, equal))                           gpt-oss: gate, up, gate, up, …

Experts, which we stack along a leading dimension:

    EXPERTS                                               Qwen2-MoE: a tensor for each expert
    Rule("{path}.experts.up_proj.kernel", "{path}.experts.mlp.v1", concat(0))
                                                          DBRX: [e * out, in], one after another

Names:

    renamed({"model": "transformer", "layers": "h", "self_attn": "attn"}, *STANDARD)
    ignore("{path}.rotary_emb.inv_freq")                  values that the configuration determines
    carry("model.layers.61.{path}")                        DeepSeek-V3: a layer that is not loaded

A layout does not read values. It relates blocks of the checkpoint's tensors to blocks of ours
(`Piece`), so that one table serves loading any slice of ours, saving any tensor of theirs, and
checking shapes before a byte is read. A norm that adds one to its weight (Gemma) does this in its
layer; its tensor is `equal`. Any function that satisfies `TensorLayout` is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from ed_infra.errors import ConfigError

from ed_models.weights.blocks import (
    ArchitectureFields,
    Piece,
    Relation,
    Shape,
    Shapes,
    TheirName,
    lay_out,
    one_tensor,
    resize_shape,
)


class TensorLayout(Protocol):
    """Relate our tensors (name -> shape, those that the rule names) to Hugging Face's.

    `hf(**more)` is the Hugging Face name; `more` fills placeholders that only that name has.
    `config` is the model's configuration.
    """

    def __call__(self, ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation: ...


#: A number, a field of the configuration (`"vision_config.num_heads"`), or a function of it.
SizeRule = int | str | Callable[..., int]


class Rule(NamedTuple):
    """Our name or names, the Hugging Face name, and the layout of the values."""

    ours: str | tuple[str, ...]
    hf: str
    layout: TensorLayout


# One tensor for one parameter.


def permute(*axes: int) -> TensorLayout:
    """Dimension `i` of ours is dimension `axes[i]` of theirs."""

    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        ((name, shape),) = ours.items()
        if sorted(axes) != list(range(len(shape))):
            raise ConfigError(f"permute{axes} does not order the dimensions of {name} {shape}")
        theirs = tuple(shape[axes.index(d)] for d in range(len(shape)))
        regions = tuple(map(range, shape)), tuple(map(range, theirs))
        return Relation({hf(): theirs}, [Piece(name, hf(), *regions, axes)])

    return relate


def equal(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """The same tensor, perhaps under another name."""
    (shape,) = ours.values()
    return permute(*range(len(shape)))(ours, hf, config)


def transpose(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """Last two dimensions swapped: our kernels are [.., in, out], torch's weights [.., out, in]."""
    ((name, shape),) = ours.items()
    if len(shape) < 2:
        raise ConfigError(f"{name} {shape} has too few dimensions to be a transposed weight")
    *leading, a, b = range(len(shape))
    return permute(*leading, b, a)(ours, hf, config)


def pad_rule(
    axis: int, *, pad_before: int = 0, pad_after: int = 0, inner_layout: TensorLayout = equal
) -> TensorLayout:
    """Their tensor has further entries along `axis`: skipped when read, zero when written."""

    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        name, shape, pieces = one_tensor(inner_layout(ours, hf, config))
        size = shape[axis]
        moved = [q for p in pieces for q in lay_out(p, axis % len(shape), size, size, pad_before)]
        return Relation({name: resize_shape(shape, axis, pad_before + size + pad_after)}, moved)

    return relate


# Several parameters in one tensor.


def split(
    axis: int, inner_layout: TensorLayout = transpose, *, groups: SizeRule = 1
) -> TensorLayout:
    """Concatenate our tensors along `axis` of theirs, in groups.

    Each of ours is cut into `groups` equal shares; the first shares of all come first, then the
    second shares. With one group each parameter is in one block.

    Args:
        axis: dimension of *their* tensor.
        inner_layout: the layout of each of our tensors in a separate tensor.
        groups: how many, such as the key-value heads where queries, key and value of each lie
            together.
    """
    return _fuse_tensors(axis, inner_layout, lambda config, size: _number(groups, config))


def interleave(axis: int, inner_layout: TensorLayout = transpose) -> TensorLayout:
    """Ours alternate along `axis` of theirs: entry 0 of each, entry 1 of each, and so on."""
    return _fuse_tensors(axis, inner_layout, lambda config, size: size)


def _fuse_tensors(
    axis: int, inner_layout: TensorLayout, count: Callable[[object, int], int]
) -> TensorLayout:
    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        parts = [one_tensor(inner_layout({n: s}, hf, config)) for n, s in ours.items()]
        if len({resize_shape(shape, axis, 0) for _, shape, _ in parts}) > 1:
            raise ConfigError(
                f"{', '.join(ours)} cannot lie in {hf()!r}, one after another along dimension "
                f"{axis}: their shapes {[s for _, s, _ in parts]} differ in another one"
            )
        name, shape, _ = parts[0]
        sizes = [shape[axis] for _, shape, _ in parts]
        groups = count(config, sizes[0])
        if groups < 1 or any(size % groups for size in sizes):
            raise ConfigError(
                f"{', '.join(ours)} lie in {hf()!r} in {groups} groups, which do not divide "
                f"their sizes {sizes}"
            )
        period = sum(sizes) // groups
        pieces, offset = [], 0
        for (_, _, part_pieces), size in zip(parts, sizes, strict=True):
            for p in part_pieces:
                pieces += lay_out(p, axis % len(shape), size // groups, period, offset)
            offset += size // groups
        return Relation({name: resize_shape(shape, axis, sum(sizes))}, pieces)

    return relate


def fused(
    parts: Sequence[str], fused_name: str, *, groups: SizeRule = 1, layout: TensorLayout = transpose
) -> tuple[Rule, Rule]:
    """Rules for linear layers `parts` that are one layer `fused_name` in the checkpoint.

    Args:
        parts, fused_name: names of layers under one path, such as `"q_proj"`.
        groups: see `split`.
        layout: of a kernel: `transpose`, or `equal` where theirs is [in, out] too.

    Returns:
        the rules of the kernels and of the biases.
    """
    kernels = tuple(f"{{path}}.{part}.kernel" for part in parts)
    biases = tuple(f"{{path}}.{part}.bias" for part in parts)
    features = -2 if layout is transpose else -1
    return (
        Rule(kernels, f"{{path}}.{fused_name}.weight", split(features, layout, groups=groups)),
        Rule(biases, f"{{path}}.{fused_name}.bias", split(-1, equal, groups=groups)),
    )


# Experts.


def stack(placeholder: str = "expert", inner_layout: TensorLayout = transpose) -> TensorLayout:
    """Entry `e` of our leading dimension is their tensor with `{placeholder}` = e."""

    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        result = Relation({}, [])
        for e in range(_leading(ours)):
            one = inner_layout(
                _entry(ours), lambda e=e, **more: hf(**{placeholder: e}, **more), config
            )
            result.hf_shapes.update(one.hf_shapes)
            result.pieces.extend(replace(p, our_region=(e, *p.our_region)) for p in one.pieces)
        return result

    return relate


#: Experts that have a tensor each: `experts.7.up_proj.weight`.
EXPERTS = Rule("{path}.experts.{name}.kernel", "{path}.experts.{expert}.{name}.weight", stack())


def concat(axis: int, inner_layout: TensorLayout = transpose) -> TensorLayout:
    """Concatenate the entries of our leading dimension along `axis` of one tensor of theirs."""

    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        name, shape, pieces = one_tensor(inner_layout(_entry(ours), hf, config))
        size, count = shape[axis], _leading(ours)
        laid = [
            replace(q, our_region=(e, *q.our_region))
            for e in range(count)
            for p in pieces
            for q in lay_out(p, axis % len(shape), size, size, e * size)
        ]
        return Relation({name: resize_shape(shape, axis, count * size)}, laid)

    return relate


# Names.


def renamed(names: Mapping[str, str], *rules: Rule) -> tuple[Rule, ...]:
    """The rules, with parts of their Hugging Face names replaced; see `renamer`."""
    rename = renamer(names)

    def under_new_names(layout: TensorLayout) -> TensorLayout:
        return lambda ours, hf, config: layout(ours, lambda **more: rename(hf(**more)), config)

    return tuple(r._replace(layout=under_new_names(r.layout)) if r.ours else r for r in rules)


def renamer(names: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces parts of names.

    A name is read part by part from the left. Where several entries of `names` fit, the first one
    counts; what it wrote is not read again. A key may span parts (`"mlp.up_proj"`), and `{i}` in it
    is any one part, which the value may repeat; an empty value drops the parts.
    """
    table = [(key.split("."), value) for key, value in names.items()]

    def rename(name: str) -> str:
        parts, result = name.split("."), []
        while parts:
            for key, value in table:
                bound = _bind(key, parts)
                if bound is not None:
                    result.append(value.format(**bound))
                    parts = parts[len(key) :]
                    break
            else:
                result.append(parts.pop(0))
        return ".".join(filter(None, result))

    return rename


def ignore(hf: str) -> Rule:
    """Tensors of a checkpoint that no model needs; their names as the checkpoint has them.

    They repeat another tensor, or the configuration determines them. They are not written.
    """
    return Rule((), hf, equal)


def carry(hf: str) -> Rule:
    """Tensors of a part that a family does not compute; their names as the checkpoint has them.

    They are copied to each checkpoint that is saved (`ed_models.checkpoints.carried`).
    """
    return Rule((), hf, untouched)


def untouched(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """The layout of tensors that are copied unchanged."""
    return Relation({}, [])


STANDARD: tuple[Rule, ...] = (
    Rule("{path}conv1d.kernel", "{path}conv1d.weight", permute(2, 1, 0)),
    Rule("{path}.kernel", "{path}.weight", transpose),
    Rule("{path}.embedding", "{path}.weight", equal),
    Rule("{path}", "{path}", equal),
    # Values that the configuration determines, in old checkpoints.
    ignore("{path}.rotary_emb.inv_freq"),
    ignore("{path}.attn.bias"),
    ignore("{path}.attn.masked_bias"),
)

#: Mixtral's names: `block_sparse_moe.experts.7.w1.weight` and so on.
BLOCK_SPARSE = renamed(
    {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    EXPERTS,
    *STANDARD,
)

#: Mamba's projections from the stream are one tensor: what enters the recurrence, and its gate.
MAMBA = (*fused(("in_proj", "z_proj"), "in_proj"), *STANDARD)

#: Mamba-2's are one tensor too, and its convolutions are one.
MAMBA2 = (
    *fused(("z_proj", "in_proj", "bc_proj", "dt_proj"), "in_proj"),
    Rule(
        ("{path}.conv1d.kernel", "{path}.bc_conv1d.kernel"),
        "{path}.conv1d.weight",
        split(0, permute(2, 1, 0)),
    ),
    Rule(("{path}.conv1d.bias", "{path}.bc_conv1d.bias"), "{path}.conv1d.bias", split(0, equal)),
    *STANDARD,
)

#: Names of Mamba's body: `backbone.embeddings`, `backbone.norm_f`.
BACKBONE = {
    "model.embed_tokens": "backbone.embeddings",
    "model.norm": "backbone.norm_f",
    "model": "backbone",
}

#: Head -> embedding, of models whose head is the embedding if `tie_word_embeddings` is set. A
#: class with other names overrides `TIED_WEIGHTS`.
TIED: Mapping[str, str] = {"lm_head.kernel": "model.embed_tokens.embedding"}
#: The same, of models whose decoder is a part of their body.
NESTED_TIED = {"lm_head.kernel": "model.language_model.embed_tokens.embedding"}


def _leading(ours: Mapping[str, Shape]) -> int:
    sizes = {shape[0] if shape else 0 for shape in ours.values()}
    if len(sizes) != 1:
        raise ConfigError(f"{', '.join(ours)} have leading dimensions of different size: {sizes}")
    return sizes.pop()


def _entry(ours: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape[1:] for name, shape in ours.items()}


def _number(number: SizeRule, config: ArchitectureFields) -> int:
    if callable(number):
        return number(config)
    if isinstance(number, int):
        return number
    value = config
    for field in number.split("."):
        value = getattr(value, field, None)
    if not isinstance(value, int):
        raise ConfigError(
            f"a weight rule reads {number!r}, but the configuration has no such number"
        )
    return value


def _bind(key: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    """Fit a key of `renamed` to the first parts of a name."""
    if len(key) > len(parts):
        return None
    bound: dict[str, str] = {}
    for expected, part in zip(key, parts, strict=False):
        if expected.startswith("{"):
            bound[expected[1:-1]] = part
        elif expected != part:
            return None
    return bound
