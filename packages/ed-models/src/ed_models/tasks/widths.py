"""The maximal update parametrization (µP): initial scales and learning rates by width.

A model in µP has the same best learning rate at each width (Yang et al. 2022, arXiv 2203.03466,
table 3 for Adam). A *base model* with smaller widths is the reference, as in the authors' package
`mup`: a dimension that differs between the two models is a width, and `m` is the input width of a
matrix divided by that of the base model.

| kind   | parameter                                        | initial scale | learning rate |
| ------ | ------------------------------------------------ | ------------- | ------------- |
| hidden | matrix with two widths                           | m^-1/2        | 1/m           |
| output | matrix from a width: head, router                | 1/m           | 1/m           |
| other  | embedding, bias, norm, matrix from a fixed size  | 1             | 1             |

The scales multiply the initial values at the base width (`initializer_range`). The parametrization
is in the weights alone: the forward pass has no multiplier, so a saved model is an ordinary
checkpoint. The multipliers of the paper are folded into a weight by the symmetry of Adam (lemma
J.1): a multiplier `c` is the factor `c` on the initial value and on the learning rate.

- The scores of attention are divided by the head dimension instead of its root, and are those of
  the base model at its head dimension. The factor is in the projection or the norm of the queries.
- The logits of a tied head are divided by `m`. The factor is in the final norm.
- With a base depth, the outputs of attention and feed-forward are multiplied by base depth / depth
  (CompleteP, Dey et al. 2025, arXiv 2505.01618). The factor is in their last matrix and its bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.parameter_names import canonical, is_stacked
from ed_layers.attention.blocks.self_attention import SelfAttention
from flax import nnx

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.decoder import Decoder
from ed_models.tasks.causal_lm import CausalLM

#: Last parts of the names of parameters that the table has a row for.
LEAVES = ("kernel", "bias", "weight", "embedding", "sinks")
#: Field of the number of layers.
DEPTH = "num_hidden_layers"
#: Norms of the outputs of attention and feed-forward, which undo a factor on the outputs.
_OUTPUT_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm")

_ModelT = TypeVar("_ModelT", bound=EasyDeLBaseModule)


class WidthFactors(NamedTuple):
    """Factors of a parameter.

    Attributes:
        kind: `hidden`, `output` or `other`.
        scale: factor on the initial values.
        rate: factor on the learning rate.
    """

    kind: str
    scale: float
    rate: float

    def fold(self, multiplier: float) -> WidthFactors:
        """Return the factors with a multiplier of the forward pass."""
        return WidthFactors(self.kind, self.scale * multiplier, self.rate * multiplier)


def compute_width_factors(
    model: EasyDeLBaseModule, base_fields: Mapping[str, int]
) -> dict[str, WidthFactors]:
    """Return the factors of each parameter of a model by canonical name.

    Args:
        model: a causal language model with one decoder; its arrays are not read.
        base_fields: fields of the configuration of the base model that differ: `hidden_size`,
            `intermediate_size`, `num_attention_heads` and so on. `num_hidden_layers` is the depth
            of the base model.

    Raises:
        ConfigError: the table has no row for a part of the model, or the base model differs in
            more than widths.
    """
    body = _check_model(model)
    fields = dict(base_fields)
    depth = fields.pop(DEPTH, None)
    config = model.config
    if "hidden_size" in fields and not fields.keys() & {"num_attention_heads", "head_dim"}:
        raise ConfigError(
            f"base_widths {dict(base_fields)}: hidden_size differs, but the attention of the base "
            "model has the same width: set num_attention_heads (best, as the heads keep their "
            "size) or head_dim"
        )
    base_config = config.replace(**fields)
    with nnx.use_eager_sharding(False):
        base = nnx.eval_shape(lambda: type(model)(base_config, rngs=nnx.Rngs(0)))
    base_shapes = _list_shapes(base)
    factors: dict[str, WidthFactors] = {}
    for name, shape in _list_shapes(model).items():
        if len(base_shapes.get(name, ())) != len(shape):
            raise ConfigError(f"base_widths {dict(base_fields)}: the base model has no {name}")
        factors[name] = _compute_factors(name, shape, base_shapes[name])
    multipliers = _scale_queries(model, base_config, factors) | _scale_logits(model, base_config)
    if depth is not None:
        multipliers |= _scale_branches(body, factors, depth)
    return {name: one.fold(multipliers.get(name, 1.0)) for name, one in factors.items()}


def scale_parameters(model: _ModelT, factors: Mapping[str, WidthFactors]) -> _ModelT:
    """Multiply the initial values of a new model by their factors, in place; return the model."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        scale = factors[canonical(path)[0]].scale
        if scale == 1.0:
            continue
        *parents, last = path
        part = cast(Any, model)
        for key in parents:
            part = part[key] if isinstance(key, int) else getattr(part, str(key))
        # A norm of 1 + weight multiplies by the sum.
        offset = getattr(part, "offset", 0.0) if last == "weight" else 0.0
        value = variable.get_value()
        getattr(part, str(last)).set_value(((value + offset) * scale - offset).astype(value.dtype))
    return model


def _check_model(model: EasyDeLBaseModule) -> Decoder:
    """Return the decoder of a model to which the table applies."""
    body = getattr(model, "model", None)
    if not isinstance(model, CausalLM) or not isinstance(body, Decoder):
        raise ConfigError(
            f"parametrization mup: {type(model).__name__} is not a causal language model with one "
            "decoder; omit parametrization"
        )
    if model.multiplies_by_width or body.multiplies_by_width:
        raise ConfigError(
            f"parametrization mup: {type(model).__name__} multiplies embeddings or logits by a "
            "function of hidden_size, which contradicts the table of µP; use a family without "
            "such a factor, such as llama or qwen3, or omit parametrization"
        )
    if model.config.mtp_head is not None or model.lora_is_enabled:
        raise ConfigError(
            "parametrization mup: the model has an MTP layer or adapters, for which µP has no "
            "rule; omit mtp_head and lora, or parametrization"
        )
    return body


def _list_shapes(model: EasyDeLBaseModule) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by canonical name, without the dimension of layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        leaves = jax.tree.leaves(variable.get_value())
        if len(leaves) != 1:
            raise ConfigError(
                f"parametrization mup: {canonical(path)[0]} is quantized; train the model without "
                "quantization.model"
            )
        shape = leaves[0].shape[1:] if is_stacked(path) else leaves[0].shape
        shapes |= dict.fromkeys(canonical(path), tuple(shape))
    return shapes


def _compute_factors(name: str, shape: tuple[int, ...], base: tuple[int, ...]) -> WidthFactors:
    """Return the row of the table for a parameter."""
    leaf = name.rpartition(".")[2]
    if leaf not in LEAVES:
        raise ConfigError(
            f"parametrization mup: the table has no row for {name}, a parameter of a recurrence; "
            "use a family with attention alone, or omit parametrization"
        )
    widths = [size != other for size, other in zip(shape, base, strict=True)]
    if leaf == "kernel":
        if any(widths[:-2]):
            raise ConfigError(
                f"base_widths: {name} has the shape {list(shape)}, and that of the base model is "
                f"{list(base)}: the number of experts is not a width, keep it"
            )
        ratio = shape[-2] / base[-2]
        if widths[-2]:
            kind = "hidden" if widths[-1] else "output"
            return WidthFactors(kind, ratio ** (-0.5 if widths[-1] else -1.0), 1 / ratio)
    elif sum(widths) > 1 and leaf != "weight":
        raise ConfigError(
            f"base_widths: {name} has the shape {list(shape)}, and that of the base model is "
            f"{list(base)}: keep the number of rows"
        )
    return WidthFactors("other", 1.0, 1.0)


def _scale_queries(
    model: EasyDeLBaseModule, base: EasyDeLBaseConfig, factors: Mapping[str, WidthFactors]
) -> dict[str, float]:
    """Return the multipliers that divide scores by the head dimension."""
    size, base_size = _get_head_size(model.config), _get_head_size(base)
    if size == base_size:
        return {}
    attentions = [part for _, part in nnx.iter_modules(model) if isinstance(part, SelfAttention)]
    if not attentions or any(part.scores.scale is not None for part in attentions):
        raise ConfigError(
            f"base_widths: head_dim is {base_size}, but {size} in the model, whose attention has a "
            "separate scale: keep head_dim, and change num_attention_heads"
        )
    ends = (".self_attn.q_norm.weight",)
    if not any(name.endswith(ends) for name in factors):
        ends = (".self_attn.q_proj.kernel", ".self_attn.q_proj.bias")
    return {name: (base_size / size) ** 0.5 for name in factors if name.endswith(ends)}


def _get_head_size(config: EasyDeLBaseConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _scale_logits(model: EasyDeLBaseModule, base: EasyDeLBaseConfig) -> dict[str, float]:
    """Return the multipliers of the final norm before a tied head."""
    assert isinstance(model, CausalLM)
    ratio: float = model.config.hidden_size / base.hidden_size
    if not model.is_tied or ratio == 1.0:
        return {}
    names = [name for name in _list_shapes(model) if name.startswith("model.norm.")]
    if not names:
        raise ConfigError(
            "parametrization mup: the head is the embedding, and no weight of a final norm can "
            "divide its logits: set tie_word_embeddings: false"
        )
    return dict.fromkeys(names, 1 / ratio)


def _scale_branches(
    body: Decoder, factors: Mapping[str, WidthFactors], depth: int
) -> dict[str, float]:
    """Return the multipliers of the last matrices of attention and feed-forward."""
    normed = next((n for n in factors if any(norm in n for norm in _OUTPUT_NORMS)), None)
    if normed is not None:
        raise ConfigError(
            f"base_widths: {DEPTH} scales the outputs of attention and feed-forward, which this "
            f"family norms ({normed}): omit {DEPTH}"
        )
    multiplier = depth / body.depth(body.config)
    multipliers: dict[str, float] = {}
    for path, variable in nnx.to_flat_state(nnx.state(body.layers, nnx.Param)):
        axes = variable.get_metadata().get("axes") or ()
        if len(axes) > 1 and axes[-1] == "embed":
            for name in canonical(("model", "layers", *path)):
                multipliers[name] = multiplier
                bias = f"{name.removesuffix('.kernel')}.bias"
                if bias in factors:
                    multipliers[bias] = multiplier
    return multipliers
