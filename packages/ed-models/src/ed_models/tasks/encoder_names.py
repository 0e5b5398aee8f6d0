"""The heads of encoders, and the names of their parameters in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_layers import dropout
from ed_layers.activations import activation
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.base.new_heads import new_heads
from ed_models.weights.blocks import Shapes
from ed_models.weights.rules import STANDARD, Rule, ignore, renamed


@dataclass(frozen=True)
class HeadNames:
    """The form of a head, `out(drop(norm(activation(dense(drop(x))))))`, and its names.

    Attributes:
        out: name of the last linear layer in checkpoints.
        dense, norm: names of the linear layer and the norm in front of it; None = there is none.
        bias: name of the bias of a tied language-model head.
        activation: name of the activation after `dense`, or of the field with its name.
        dropout: the field with the dropout rate, replaced by `hidden_dropout_prob` if the field is
            missing or None; None = no dropout.
        drops_input: whether the input of `dense` is dropped, too.
        requires: fields of the configuration -> their only supported value.
    """

    out: str
    dense: str | None = None
    norm: str | None = None
    bias: str | None = None
    activation: str = "tanh"
    dropout: str | None = "classifier_dropout"
    drops_input: bool = False
    requires: Mapping[str, object] = field(default_factory=dict)

    def check(self, config: EasyDeLBaseConfig) -> None:
        """Raise ConfigError if the configuration describes another form of the head."""
        for name, only in self.requires.items():
            if (value := getattr(config, name, only)) != only:
                raise ConfigError(
                    f"{config.model_type}: {name}={value!r} is not supported for this task, only "
                    f"{only!r} is"
                )

    def names(self) -> list[str]:
        """Return the names in checkpoints."""
        return [name for name in (self.out, self.dense, self.norm, self.bias) if name]

    def biases(self) -> tuple[str, ...]:
        """Return the names of the bias of a language-model head in checkpoints."""
        return (self.bias, f"{self.out}.bias") if self.bias else ()

    def get_activation(self, config: EasyDeLBaseConfig) -> str:
        """Return the name of the activation."""
        return getattr(config, self.activation, self.activation)

    def rate(self, config: EasyDeLBaseConfig) -> float:
        """Return the dropout rate of the head."""
        rate = 0.0 if self.dropout is None else getattr(config, self.dropout, None)
        return config.hidden_dropout_prob if rate is None else rate


def lm_head(activation: str) -> HeadNames:
    """Return the head of RoBERTa and its relatives that predicts tokens."""
    return HeadNames(
        out="lm_head.decoder",
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        bias="lm_head.bias",
        activation=activation,
        dropout=None,
    )


def bert_body(prefix: str) -> dict[str, str]:
    """Return the names of a body like BERT's; `prefix` names the body in checkpoints of tasks."""
    return {
        "model.embed_tokens": f"{prefix}.embeddings.word_embeddings",
        "model.embed_positions": f"{prefix}.embeddings.position_embeddings",
        "model.embed_types": f"{prefix}.embeddings.token_type_embeddings",
        "model.embed_norm": f"{prefix}.embeddings.LayerNorm",
        "model.layers": f"{prefix}.encoder.layer",
        "model": prefix,
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.o_proj": "attention.output.dense",
        "input_layernorm": "attention.output.LayerNorm",
        "mlp.up_proj": "intermediate.dense",
        "mlp.down_proj": "output.dense",
        "post_attention_layernorm": "output.LayerNorm",
    }


class HeadTransform(nnx.Module):
    """The layers of a head in front of the last one: a linear layer, an activation, a norm.

    Args:
        parts: creates the layers, with the norms of the family.
        names: the form of the head.
        outputs: number of outputs; None = `hidden_size`.
    """

    def __init__(self, parts: Parts, names: HeadNames, outputs: int | None = None):
        d = parts.config.hidden_size
        names.check(parts.config)
        if names.dense:
            bias = getattr(parts.config, "classifier_bias", True)
            self.dense = parts.linear(d, outputs or d, axes=("embed", None), bias=bias)
        if names.norm:
            self.norm = parts.own_norm(outputs or d)
        self.activation = names.get_activation(parts.config)
        self.rate, self.drops_input = names.rate(parts.config), names.drops_input

    def __call__(
        self, x: Float[Array, "*rows d"], key: jax.Array | None = None
    ) -> Float[Array, "*rows e"]:
        """Return the features; `key` is the dropout key of the call."""
        if hasattr(self, "dense"):
            x = _apply_dropout(x, key, self.rate if self.drops_input else 0.0, 1)
            x = activation(self.activation)(self.dense(x))
        if hasattr(self, "norm"):
            x = self.norm(x)
        return _apply_dropout(x, key, self.rate, 2)


def _apply_dropout(x: jax.Array, key: jax.Array | None, rate: float, site: int) -> jax.Array:
    """Apply dropout to the features of a head; a `key` of None leaves them unchanged."""
    if key is None or not rate:
        return x
    return dropout.apply_dropout(x, rate, jax.random.fold_in(key, site))


@dataclass(frozen=True)
class EncoderNames:
    """The names of an encoder family in checkpoints.

    Attributes:
        body: parts of our names -> parts of Hugging Face's; see `ed_models.weights.rules.renamer`.
        heads: task -> its head. The pooler is the head of `BASE_MODULE`: its `out` names the linear
            layer.
        rules: rules in front of the standard ones.
        ignored_names: names of heads of tasks that do not exist here; their tensors are ignored.
    """

    body: Mapping[str, str]
    heads: Mapping[TaskType, HeadNames]
    rules: tuple[Rule, ...] = ()
    ignored_names: tuple[str, ...] = field(default=())

    def weights(self, task: TaskType) -> tuple[Rule, ...]:
        """Return the weight rules of a task."""
        head, names = self.heads.get(task), dict[str, str]()
        if head is not None:
            parts = {"transform.dense": head.dense, "transform.norm": head.norm}
            out = "model.pooler" if task == TaskType.BASE_MODULE else "score"
            parts |= {out: head.out, "lm_head": head.out, "output_bias": head.bias}
            names = {ours: theirs for ours, theirs in parts.items() if theirs}
        used = set() if head is None else {*head.names()}
        heads = [name for task_head in self.heads.values() for name in task_head.names()]
        unused = dict.fromkeys(name for name in (*heads, *self.ignored_names) if name not in used)
        pooler = self.heads.get(TaskType.BASE_MODULE)
        if pooler is not None and pooler.out in unused:
            # A checkpoint of the body has names without their first part.
            unused[pooler.out.partition(".")[2]] = None
        # The bias of a language-model head has two names: a tied head uses `bias`, another one the
        # bias of `out`.
        return (
            *renamed({**names, **self.body}, *self.rules, *STANDARD),
            *(rule for name in unused for rule in (ignore(name), ignore(f"{name}.{{path}}"))),
            *(ignore(name) for name in (head.biases() if head is not None else ())),
            ignore("{path}.position_ids"),
        )

    def new_tensors(
        self, task: TaskType, config: EasyDeLBaseConfig, missing: Shapes
    ) -> dict[str, np.ndarray]:
        """Return random values of a head that a checkpoint of another task lacks; log a warning.

        Args:
            task: the task that is loaded.
            config: configuration of the checkpoint; `architectures` names the saved class.
            missing: shapes of the tensors that the checkpoint lacks.
        """
        head = self.heads.get(task)
        if head is None:
            return {}
        return new_heads(task, config, missing, head.names(), (head.norm,))
