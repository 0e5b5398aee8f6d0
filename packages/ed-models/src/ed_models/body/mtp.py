"""The layer that predicts the token after the next one (MTP), the tensors `mtp.*` of checkpoints.

The layer reads the last hidden state h of a token and the embedding e of the token after it:

    x[i] = fc([pre_fc_norm_embedding(e[i + 1]), pre_fc_norm_hidden(h[i])])
    g[i] = norm(layer(x)[i])        logits of token i + 2 = head(g[i])

`layer` is a layer of the family with full attention, with experts if the family has experts. The
embedding and the head are those of the model. `token_counts` [v] says how often the model's answers
contained each token. A head of `draft_vocab_size` tokens predicts the most frequent ones, which is
the selection of EAGLE-3 (`d2t`) at any size; without counts, the first tokens. Files contain counts
only if there are some. To predict one more token, the layer reads g in the
place of h (Gloeckle et al., arXiv:2404.19737; DeepSeek-AI, arXiv:2412.19437, section 2.2). Names
and shapes are those of the checkpoints of Qwen3-Next and Qwen3.5, which vLLM's `qwen3_next_mtp`
reads; `transformers` has no such layer.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import Features
from ed_infra.logging import get_logger, once
from ed_infra.outputs import BaseModelOutput
from ed_layers import native
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.projections.dot import Transposed
from ed_layers.projections.head import Head
from ed_layers.projections.linear import Linear
from ed_layers.updated import Updated
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.decoder import Decoder
from ed_models.protocol import LanguageModel

logger = get_logger(__name__)
#: Name of the layer in a model and in its checkpoints.
MTP = "mtp"
#: Name of its counts in a checkpoint.
TOKEN_COUNTS = "mtp.token_counts"
#: Logit of a token that a head does not compute. Infinity would mark a damaged step.
LOGIT_OF_OTHERS = -1e30
_FULL = "full_attention"
#: Fields of a configuration that make a single layer one with experts.
_WITH_EXPERTS = {"mlp_only_layers": [], "first_k_dense_replace": 0, "decoder_sparse_step": 1}


@dataclass(frozen=True)
class AddCounts:
    """The rule of `token_counts`: the sum of the counts of all steps."""

    def __call__(self, value: jax.Array, reported: jax.Array) -> jax.Array:
        """Return the new value."""
        return value + reported


class MTPLayer(Decoder):
    """The body of a family with one layer, which reads hidden states besides embeddings.

    The layer has no embedding: a caller passes embeddings, or adds an embedding (`as_draft`).
    """

    @staticmethod
    def embedding(parts: Parts) -> Any:
        """Return nothing: the embedding is that of the model."""
        return None

    def add_parts(self, parts: Parts) -> None:
        """Create the norms and the projection of the two inputs."""
        del self.embed_tokens  # `as_draft` adds the embedding of the model
        d = parts.config.hidden_size
        self.pre_fc_norm_embedding = parts.own_norm(d)
        self.pre_fc_norm_hidden = parts.own_norm(d)
        self.fc = parts.linear(2 * d, d, axes=(None, "embed"))
        counts = jnp.zeros((parts.config.vocab_size,), jnp.float32)
        self.token_counts = Updated(counts, axes=(None,), rule=AddCounts(), optional=True)

    def embed(
        self, input_ids: Int[Array, "b s"] | None, inputs_embeds: Float[Array, "b s d"] | None
    ) -> Float[Array, "b s d"]:
        """Return the embeddings of the tokens."""
        return super().embed(input_ids, None) if inputs_embeds is None else inputs_embeds

    def enter(self, x: Float[Array, "b s d"], ctx: Ctx) -> Float[Array, "b s d"]:
        """Return the hidden states unchanged: a family scales only its embeddings here."""
        return x

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.config.hidden_size

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        hidden: Float[Array, "b s d"] | None = None,
        features: Features | None = None,
        **inputs: object,
    ) -> BaseModelOutput:
        """Return the hidden states g [b, s, d].

        Args:
            input_ids: the token after each position.
            inputs_embeds: its embedding, instead of the token.
            hidden: the last hidden state of each position.
            features: the hidden states as rows of a table, and the row of each position.
            inputs: masks, positions and cache; see `CausalLM.__call__`.
        """
        embeds = self.embed(input_ids, inputs_embeds)
        if hidden is None:
            assert features is not None, "the layer reads hidden states"
            hidden = features.insert(jnp.zeros_like(embeds))
        with native.chosen_by(self.config):
            pair = self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)
            x = self.fc(jnp.concatenate(pair, axis=-1))
        return super().__call__(inputs_embeds=x, **cast("dict[str, Any]", inputs))


@cache
def derive_layer_class(body: type[Decoder]) -> type[MTPLayer]:
    """Return the class of the layer for the body of a family.

    Raises:
        ConfigError: the body is no decoder, or adds learned positions to its embeddings.
    """
    if not issubclass(body, Decoder) or body.add_parts is not Decoder.add_parts:
        raise ConfigError(
            f"mtp_head: {body.__name__} is no decoder of one stream without learned positions: "
            "omit mtp_head"
        )
    name = f"{body.__name__.removesuffix('Model')}MTPLayer"
    content = {"__doc__": MTPLayer.__doc__, "__module__": body.__module__}
    return cast(Any, type(MTPLayer))(name, (MTPLayer, body), content)


def build_layer(body: type[Decoder], parts: Parts) -> MTPLayer:
    """Create the layer of a model.

    Args:
        body: the class of the model's body.
        parts: dtypes, randomness and configuration of the model.
    """
    layer_class = derive_layer_class(body)
    config = get_layer_config(parts.config)
    return layer_class(config, parts.dtype, parts.param_dtype, parts.precision, rngs=parts.rngs)


def get_layer_config(config: EasyDeLBaseConfig) -> EasyDeLBaseConfig:
    """Return the configuration of a model with one layer of full attention."""
    fields: dict[str, Any] = {"num_hidden_layers": 1, "mtp_head": None}
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds:
        if _FULL not in kinds:
            raise ConfigError(
                f"mtp_head: layer_types has no {_FULL}, only {', '.join(sorted({*kinds}))}, and "
                "the layer attends to all tokens: omit mtp_head"
            )
        fields["layer_types"] = [_FULL]
    fields |= {name: value for name, value in _WITH_EXPERTS.items() if hasattr(config, name)}
    return config.replace(**fields)


def create_tensors(
    family: type[Any], config: EasyDeLBaseConfig, names: Iterable[str]
) -> dict[str, np.ndarray]:
    """Return tensors of a new layer with random values, under the names of checkpoints.

    Args:
        family: the class of the language model.
        config: its configuration.
        names: names of the tensors.
    """
    from ed_models.checkpoints.loading import weight_map
    from ed_models.checkpoints.saving import layer_values

    once(
        logger,
        "the checkpoint has no MTP layer: the tensors mtp.* have random values and must be trained",
    )
    parts = Parts(config, nnx.Rngs(0))
    parts = replace(parts, norm_of_family=family.body_class.build_norm(parts))
    state = nnx.state(nnx.Dict({MTP: build_layer(family.body_class, parts)}))
    weights, read = weight_map(family, state, config), layer_values(state)
    return {name: weights.save(name, read) for name in names}


def create_counts(config: EasyDeLBaseConfig) -> dict[str, np.ndarray]:
    """Return the counts of a layer whose checkpoint has none, under the names of checkpoints."""
    return {TOKEN_COUNTS: np.zeros((config.get_text_config().vocab_size,), np.float32)}


def select_tokens(counts: Float[Array, " v"], size: int) -> Int[Array, " n"]:
    """Return the most frequent tokens, ascending. Of equally frequent ones, the first tokens.

    Raises:
        ConfigError: the vocabulary is smaller.
    """
    if size > len(counts):
        raise ConfigError(
            f"draft_vocab_size {size} exceeds the vocabulary of {len(counts)} tokens: lower it, or "
            "omit it"
        )
    return jnp.sort(jax.lax.top_k(counts, size)[1])


def as_draft(model: LanguageModel, vocab_size: int | None = None) -> LanguageModel:
    """Return a language model that predicts tokens with the MTP layer of a model.

    A call reads tokens, and their hidden states as `features`. The arrays are those of `model`.

    Args:
        model: a causal language model.
        vocab_size: number of tokens that the result predicts, the most frequent ones; None = all.
            All others have the smallest logit. These rows of the head are a copy.

    Raises:
        ConfigError: the model has no MTP layer, or its head is quantized.
    """
    layer = getattr(model, MTP, None)
    if layer is None:
        raise ConfigError(
            f"method mtp needs the MTP layer of the checkpoint, and this {type(model).__name__} "
            "was loaded without it: load the model with mtp_head='stored' "
            "(config_kwargs={'mtp_head': 'stored'}), or choose another method"
        )
    graphdef, state = nnx.split(layer)
    body = nnx.merge(graphdef, state)
    body.embed_tokens = cast(Any, model).model.embed_tokens
    draft = cast(Any, nnx.merge(*nnx.split(cast(nnx.Module, model))))
    del draft.mtp
    draft.model = body
    if vocab_size is None:
        return draft
    tokens = select_tokens(layer.token_counts[...], vocab_size)
    draft.drafted_tokens = DraftedTokens(tokens, axes=(None,))
    head = shorten_head(model.head(), tokens)
    weight = cast(jax.Array, head.weight)
    draft.lm_head = Linear(
        *weight.shape,
        axes=("embed", "vocab"),
        use_bias=head.bias is not None,
        dtype=layer.fc.dtype,
        param_dtype=weight.dtype,
        precision=layer.fc.precision,
        kernel_init=cast(Any, lambda *_: weight),
        rngs=nnx.Rngs(0),
    )
    if head.bias is not None:
        draft.lm_head.bias[...] = head.bias
    draft.config = draft.config.replace(tie_word_embeddings=False)
    draft.__class__ = derive_short_class(type(draft))
    return draft


class DraftedTokens(nnx.Variable):
    """The tokens of a short head, ascending, int32."""


class ShortHead:
    """A language model whose head computes the logits of some tokens of the vocabulary."""

    config: EasyDeLBaseConfig
    drafted_tokens: DraftedTokens

    def logits(self, hidden: Float[Array, "*rows d"]) -> Float[Array, "*rows v"]:
        """Return the logits; those of the other tokens are `LOGIT_OF_OTHERS`."""
        scores = cast(Any, super()).logits(hidden)
        shape = (*scores.shape[:-1], self.config.get_text_config().vocab_size)
        others = jnp.full(shape, LOGIT_OF_OTHERS, scores.dtype)
        tokens = self.drafted_tokens[...]
        return others.at[..., tokens].set(
            scores, mode="drop", indices_are_sorted=True, unique_indices=True
        )


@cache
def derive_short_class(family: type[Any]) -> type[Any]:
    """Return the class of a language model of a family with a short head."""
    content = {"__doc__": ShortHead.__doc__, "__module__": family.__module__}
    return cast(Any, type(family))(f"Short{family.__name__}", (ShortHead, family), content)


def shorten_head(head: Head, tokens: Int[Array, " n"]) -> Head:
    """Return a head with the logits of some tokens only.

    Raises:
        ConfigError: the matrix is quantized.
    """
    weight, bias = head.weight, head.bias
    if isinstance(weight, Transposed):
        weight = weight.rows[tokens].T
    elif isinstance(weight, jax.Array):
        weight = weight[:, tokens]
    else:
        raise ConfigError(
            f"draft_vocab_size selects rows of the head, which is a {type(weight).__name__}: omit "
            "it, or do not quantize the head"
        )
    return replace(head, weight=weight, bias=None if bias is None else bias[tokens])


def select_draft_state(state: nnx.State, vocab_size: int | None = None) -> nnx.State:
    """Return the state of the model of `as_draft` from the state of its language model."""
    leaves: dict[tuple[Any, ...], Any] = {}
    for path, value in nnx.to_flat_state(state):
        if path[0] == MTP:
            leaves["model", *path[1:]] = value
        elif path[0] != "model" or path[1] == "embed_tokens":
            leaves[path] = value
    if vocab_size is not None:
        head = {path: value for path, value in leaves.items() if path[0] == "lm_head"}
        if not head:
            table = leaves["model", "embed_tokens", "embedding"]
            head = {("lm_head", "kernel"): table.replace(table[...].T)}
        tokens = select_tokens(leaves["model", "token_counts"][...], vocab_size)
        leaves |= {path: value.replace(value[..., tokens]) for path, value in head.items()}
        leaves["drafted_tokens",] = DraftedTokens(tokens)
    return nnx.from_flat_state([*leaves.items()])
