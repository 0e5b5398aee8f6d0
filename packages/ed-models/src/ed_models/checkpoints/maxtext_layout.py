"""The parameters of MaxText and tunix as tables: one record for each family.

MaxText stores a matrix of heads as [inputs, heads, head_dim], and the same part of all layers as
one array, with the layers along the second axis (`scan_layers`), or one array for each layer.
Three kinds of values differ from Hugging Face's, as in MaxText's conversion
(`maxtext/checkpoint_conversion/utils/param_mapping.py`):

- queries of models without norms of queries contain the factor of the attention, 1/sqrt(head_dim)
- queries and keys of Llama 3.1 alternate the two halves of each head
- Gemma's norms contain the added one, and its embeddings the factor sqrt(hidden_size)

tunix stores Hugging Face's values, always one array for each layer (`tunix/models/*/params.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.weights.blocks import ArchitectureFields, Shape


class StoredParameter(NamedTuple):
    """A parameter of a layer, or of the whole model.

    Attributes:
        theirs: its name below the layer, with dots.
        hf: name in Hugging Face's layout, with `{layer}` and `{expert}`.
        inputs: number of the first axes that are the inputs of a matrix, which Hugging Face has
            last; 0 = no matrix.
        scale: factor of their values, from the configuration.
        offset: number that their values contain in addition.
        by_head: the values of each head are on two axes: heads and `head_dim`.
        rotary: the halves of a head alternate for Llama 3.1.
        has_rows: the first axis of Hugging Face's tensor is the vocabulary.
        entry: the entry along their first axis, of parameters that they join.
        axes: their order of axes before the inputs are first; empty = they are first.
    """

    theirs: str
    hf: str
    inputs: int = 0
    scale: Callable[[ArchitectureFields], float] | None = None
    offset: float = 0.0
    by_head: bool = False
    rotary: bool = False
    has_rows: bool = False
    entry: int | None = None
    axes: tuple[int, ...] = ()

    @property
    def has_other_values(self) -> bool:
        """Whether their values are calculated from Hugging Face's."""
        return self.scale is not None or self.offset != 0

    @property
    def is_expert(self) -> bool:
        """Whether the tensors of all experts are one array, whose first axis is the experts."""
        return "{expert}" in self.hf


class ArrayPlace(NamedTuple):
    """Where a part of a layer is stored: the array, and the entry among the stacked `layers`."""

    array: str
    entry: int | None = None
    layers: int = 1


#: (name of a part, layer, number of layers, whether layers are stacked) -> place.
PartLocator = Callable[[str, int, int, bool], ArrayPlace]


class Family(NamedTuple):
    """The layout of a model type.

    Attributes:
        program: its name.
        parts: the parameters of the whole model.
        layer_parts: the parameters of each layer.
        place: where a part of a layer is stored.
        period: number of layers of which their blocks consist.
    """

    program: str
    parts: tuple[StoredParameter, ...]
    layer_parts: tuple[StoredParameter, ...]
    place: PartLocator
    period: int = 1


def _place_single(part: str, layer: int, count: int, stacked: bool) -> ArrayPlace:
    if stacked:
        return ArrayPlace(f"decoder.layers.{part}", layer, count)
    return ArrayPlace(f"decoder.layers_{layer}.{part}")


def _place_in_pairs(part: str, layer: int, count: int, stacked: bool) -> ArrayPlace:
    """Gemma 2: a layer of theirs consists of a local and a global one."""
    module, _, rest = part.partition(".")
    name = f"{module}_{('local', 'global')[layer % 2]}.{rest}"
    return _place_single(name, layer // 2, count // 2, stacked)


#: Layers of a block of Gemma 3.
_CYCLE = 6


def _place_in_cycles(part: str, layer: int, count: int, stacked: bool) -> ArrayPlace:
    """Gemma 3: stacks of blocks of six layers, and the remaining layers one by one."""
    block, position = divmod(layer, _CYCLE)
    blocks = count // _CYCLE
    if not stacked:
        return _place_single(part, layer, count, stacked)
    if block == blocks:
        return ArrayPlace(f"decoder.layers_remainder.layers_{position}.{part}")
    return ArrayPlace(f"decoder.layers.layers_{position}.{part}", block, blocks)


def _place_tunix(part: str, layer: int, count: int, stacked: bool) -> ArrayPlace:
    return ArrayPlace(f"layers.{layer}.{part}")


def get_head_dim(config: ArchitectureFields) -> int:
    """Return the size of a head."""
    head_dim = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def _scale_by_head(config: ArchitectureFields) -> float:
    return 1 / math.sqrt(get_head_dim(config))


def _scale_by_setting(config: ArchitectureFields) -> float:
    return 1 / math.sqrt(config.query_pre_attn_scalar)


def _scale_embedding(config: ArchitectureFields) -> float:
    return math.sqrt(config.hidden_size)


def _scale_embedding_in_bfloat16(config: ArchitectureFields) -> float:
    """Gemma 3's conversion rounds the factor, as the model does in bfloat16."""
    return float(ml_dtypes.bfloat16(math.sqrt(config.hidden_size)))


def is_alternating(config: ArchitectureFields) -> bool:
    """Return whether the halves of a head alternate: the rotation of Llama 3.1."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    kind = (parameters or {}).get("rope_type", (parameters or {}).get("type"))
    return kind == "llama3"


_LAYER = "model.layers.{layer}."
_HEAD = StoredParameter("decoder.logits_dense.kernel", "lm_head.weight", 1, has_rows=True)
_EMBEDDING = StoredParameter("token_embedder.embedding", "model.embed_tokens.weight", has_rows=True)
_NORM = StoredParameter("decoder.decoder_norm.scale", "model.norm.weight")


def _attend(
    scale: Callable[[ArchitectureFields], float] | None = None, *, rotary: bool = False
) -> tuple[StoredParameter, ...]:
    theirs, hf = "self_attention.", _LAYER + "self_attn."
    parts = (
        StoredParameter(theirs + "query.kernel", hf + "q_proj.weight", 1, scale, rotary=rotary),
        StoredParameter(theirs + "key.kernel", hf + "k_proj.weight", 1, rotary=rotary),
        StoredParameter(theirs + "value.kernel", hf + "v_proj.weight", 1),
        StoredParameter(theirs + "out.kernel", hf + "o_proj.weight", 2),
    )
    return tuple(part._replace(by_head=True) for part in parts)


def _experts(theirs: str, hf: str, gate: str, up: str, down: str) -> tuple[StoredParameter, ...]:
    names = {"wi_0": gate, "wi_1": up, "wo": down}
    path = f"{_LAYER}{hf}.experts.{{expert}}."
    return (
        StoredParameter(f"{theirs}.gate.kernel", f"{_LAYER}{hf}.gate.weight", 1),
        *(
            StoredParameter(f"{theirs}.{name}", f"{path}{ours}.weight", 1)
            for name, ours in names.items()
        ),
    )


_MLP = tuple(
    StoredParameter(f"mlp.{theirs}.kernel", f"{_LAYER}mlp.{hf}_proj.weight", 1)
    for theirs, hf in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))
)
_NORMS = (
    StoredParameter("pre_self_attention_layer_norm.scale", _LAYER + "input_layernorm.weight"),
    StoredParameter(
        "post_self_attention_layer_norm.scale", _LAYER + "post_attention_layernorm.weight"
    ),
)
_HEAD_NORMS = (
    StoredParameter("self_attention.query_norm.scale", _LAYER + "self_attn.q_norm.weight"),
    StoredParameter("self_attention.key_norm.scale", _LAYER + "self_attn.k_norm.weight"),
)
_BIASES = tuple(
    StoredParameter(
        f"self_attention.{theirs}.bias", f"{_LAYER}self_attn.{theirs[0]}_proj.bias", by_head=True
    )
    for theirs in ("query", "key", "value")
)
_GEMMA_NORMS = tuple(
    StoredParameter(f"{theirs}.scale", f"{_LAYER}{hf}_layernorm.weight", offset=1.0)
    for theirs, hf in (
        ("pre_self_attention_norm", "input"),
        ("post_self_attention_norm", "post_attention"),
        ("pre_ffw_norm", "pre_feedforward"),
        ("post_ffw_norm", "post_feedforward"),
    )
)
_WHOLE = (_EMBEDDING, _NORM, _HEAD)


def _gemma(scale: Callable[[ArchitectureFields], float]) -> tuple[StoredParameter, ...]:
    return (_EMBEDDING._replace(scale=scale), _NORM._replace(offset=1.0), _HEAD)


_LLAMA = (*_attend(_scale_by_head, rotary=True), *_MLP, *_NORMS)
_MISTRAL = (*_attend(_scale_by_head), *_MLP, *_NORMS)
_MAXTEXT = "MaxText"
#: Model type -> MaxText's layout.
MAXTEXT: Mapping[str, Family] = {
    "llama": Family(_MAXTEXT, _WHOLE, _LLAMA, _place_single),
    "mistral": Family(_MAXTEXT, _WHOLE, _MISTRAL, _place_single),
    "mixtral": Family(
        _MAXTEXT,
        _WHOLE,
        (
            *_attend(_scale_by_head),
            *_experts("MoeBlock_0", "block_sparse_moe", "w1", "w3", "w2"),
            *_NORMS,
        ),
        _place_single,
    ),
    "qwen2": Family(_MAXTEXT, _WHOLE, (*_attend(), *_BIASES, *_MLP, *_NORMS), _place_single),
    "qwen3": Family(_MAXTEXT, _WHOLE, (*_attend(), *_HEAD_NORMS, *_MLP, *_NORMS), _place_single),
    "qwen3_moe": Family(
        _MAXTEXT,
        _WHOLE,
        (
            *_attend(),
            *_HEAD_NORMS,
            *_experts("moe_block", "mlp", "gate_proj", "up_proj", "down_proj"),
            *_NORMS,
        ),
        _place_single,
    ),
    "gemma2": Family(
        _MAXTEXT,
        _gemma(_scale_embedding),
        (*_attend(_scale_by_setting), *_MLP, *_GEMMA_NORMS),
        _place_in_pairs,
        period=2,
    ),
    "gemma3_text": Family(
        _MAXTEXT,
        _gemma(_scale_embedding_in_bfloat16),
        (
            *_attend(),
            *(part._replace(offset=1.0) for part in _HEAD_NORMS),
            *_MLP,
            *_GEMMA_NORMS,
        ),
        _place_in_cycles,
    ),
}


def _tunix(*names: tuple[str, str, int]) -> tuple[StoredParameter, ...]:
    return tuple(StoredParameter(theirs, _LAYER + hf, inputs) for theirs, hf, inputs in names)


_TUNIX_WHOLE = (
    StoredParameter("embedder.input_embedding", "model.embed_tokens.weight", has_rows=True),
    StoredParameter("final_norm.w", "model.norm.weight"),
    StoredParameter("lm_head.w", "lm_head.weight", 1, has_rows=True),
)
_TUNIX_MLP = tuple(
    StoredParameter(f"mlp.{name}_proj.kernel", f"{_LAYER}mlp.{name}_proj.weight", 1)
    for name in ("gate", "up", "down")
)
_TUNIX_LLAMA = (
    *_tunix(
        ("attn.q_proj.w", "self_attn.q_proj.weight", 1),
        ("attn.k_proj.w", "self_attn.k_proj.weight", 1),
        ("attn.v_proj.w", "self_attn.v_proj.weight", 1),
        ("attn.o_proj.w", "self_attn.o_proj.weight", 2),
        ("input_layernorm.w", "input_layernorm.weight", 0),
        ("post_attention_layernorm.w", "post_attention_layernorm.weight", 0),
    ),
    *_TUNIX_MLP,
)
_TUNIX_HEAD_NORMS = _tunix(
    ("attn.q_norm.w", "self_attn.q_norm.weight", 0), ("attn.k_norm.w", "self_attn.k_norm.weight", 0)
)
_TUNIX_BIASES = _tunix(*((f"attn.{name}_bias", f"self_attn.{name}_proj.bias", 0) for name in "qkv"))
_TUNIX_GEMMA = (
    StoredParameter("attn.q_einsum.w", _LAYER + "self_attn.q_proj.weight", 1, axes=(1, 0, 2)),
    *(
        StoredParameter(
            "attn.kv_einsum.w", f"{_LAYER}self_attn.{name}_proj.weight", 1, entry=i, axes=(1, 0, 2)
        )
        for i, name in enumerate("kv")
    ),
    *_tunix(
        ("attn.attn_vec_einsum.w", "self_attn.o_proj.weight", 2),
        ("attn._query_norm.scale", "self_attn.q_norm.weight", 0),
        ("attn._key_norm.scale", "self_attn.k_norm.weight", 0),
        ("pre_attention_norm.scale", "input_layernorm.weight", 0),
        ("post_attention_norm.scale", "post_attention_layernorm.weight", 0),
        ("pre_ffw_norm.scale", "pre_feedforward_layernorm.weight", 0),
        ("post_ffw_norm.scale", "post_feedforward_layernorm.weight", 0),
    ),
    *_TUNIX_MLP,
)
#: Model type -> tunix's layout.
TUNIX: Mapping[str, Family] = {
    "llama": Family("tunix", _TUNIX_WHOLE, _TUNIX_LLAMA, _place_tunix),
    "qwen2": Family("tunix", _TUNIX_WHOLE, (*_TUNIX_LLAMA, *_TUNIX_BIASES), _place_tunix),
    "qwen3": Family("tunix", _TUNIX_WHOLE, (*_TUNIX_LLAMA, *_TUNIX_HEAD_NORMS), _place_tunix),
    "gemma3_text": Family(
        "tunix",
        (_TUNIX_WHOLE[0], StoredParameter("final_norm.scale", "model.norm.weight")),
        _TUNIX_GEMMA,
        _place_tunix,
    ),
}

#: Rows of a vocabulary in Hugging Face's layout -> rows in MaxText's, of Gemma 2 and Gemma 3.
MAXTEXT_ROWS: Mapping[int, int] = {256_000: 256_128, 262_208: 262_144}


def list_places(
    family: Family, config: ArchitectureFields, *, stacked: bool
) -> Iterator[tuple[StoredParameter, int | None, ArrayPlace]]:
    """Yield each parameter of a model: its part, its layer, and where it is stored.

    Args:
        family: the layout.
        config: the configuration; `num_hidden_layers` and `tie_word_embeddings` are read.
        stacked: whether the layers are stacked (`scan_layers`).

    Raises:
        CheckpointError: the number of layers does not fit the blocks of the family.
    """
    count = config.num_hidden_layers
    if count % family.period:
        raise CheckpointError(
            f"num_hidden_layers={count} does not fit {family.program}'s layout of a "
            f"{config.model_type}, whose blocks have {family.period} layers"
        )
    for part in family.parts:
        yield part, None, ArrayPlace(part.theirs)
    for layer in range(count):
        for part in family.layer_parts:
            yield part, layer, family.place(part.theirs, layer, count, stacked)


def convert_to_tensor(
    values: np.ndarray, part: StoredParameter, config: ArchitectureFields
) -> np.ndarray:
    """Return the tensor of Hugging Face's layout, of one layer and one expert.

    Calculated values are float32.
    """
    if part.entry is not None:
        values = values[part.entry]
    values = values.transpose(part.axes) if part.axes else values
    if part.rotary and is_alternating(config):
        values = np.concatenate([values[..., ::2], values[..., 1::2]], axis=-1)
    if part.has_other_values:
        scale = np.float32(part.scale(config)) if part.scale else np.float32(1)
        values = values.astype(np.float32) / scale - np.float32(part.offset)
    if part.inputs:
        return values.reshape(math.prod(values.shape[: part.inputs]), -1).T
    return values if part.has_rows else values.reshape(-1)


def convert_from_tensor(
    values: np.ndarray, part: StoredParameter, config: ArchitectureFields
) -> np.ndarray:
    """Return the values of MaxText's layout, of one layer and one expert.

    Calculated values are float32, so that nothing is lost; MaxText converts them as it reads them.
    """
    head_dim = get_head_dim(config)
    values = values.T if part.inputs else values
    if part.by_head:
        axis = 1 if part.inputs == 1 else 0
        shape = values.shape
        heads = shape[axis] // head_dim
        values = values.reshape(*shape[:axis], heads, head_dim, *shape[axis + 1 :])
    if part.has_other_values:
        scale = np.float32(part.scale(config)) if part.scale else np.float32(1)
        values = values.astype(np.float32) * scale + np.float32(part.offset)
    if part.rotary and is_alternating(config):
        values = np.stack(np.split(values, 2, axis=-1), axis=-1).reshape(values.shape)
    return values


def get_tensor_shape(shape: Shape, part: StoredParameter) -> Shape:
    """Return the shape of a tensor in Hugging Face's layout, from theirs of one layer."""
    shape = shape[1:] if part.entry is not None else shape
    shape = tuple(shape[axis] for axis in part.axes) if part.axes else shape
    if part.inputs:
        return math.prod(shape[part.inputs :]), math.prod(shape[: part.inputs])
    return shape if part.has_rows else (math.prod(shape),)
