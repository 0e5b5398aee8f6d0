"""A small Llama and a packed batch, and the values that are compared between meshes.

All sizes differ, so that they can be recognized in compiled programs. Some sizes are awkward: the
vocabulary is not divisible by 8, and there are fewer key heads than devices.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import jax
import numpy as np
from ed_infra import parameter_names
from ed_infra.sharding import placement
from ed_infra.testing import LLAMA3_ROPE, tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

Dims = tuple[int, int, int, int, int]

ONE: Dims = (1, 1, 1, 1, 1)
B, S, MLP = 8, 24, 160
#: Every ordered product of five sizes that equals 8.
ALL: list[Dims] = [d for d in itertools.product((1, 2, 4, 8), repeat=5) if np.prod(d) == 8]
#: Meshes that together split each axis and each kind of activation at least once.
USUAL: list[Dims] = [
    (1, 8, 1, 1, 1),
    (2, 2, 1, 2, 1),
    (1, 2, 1, 2, 2),
    (1, 1, 1, 8, 1),
    (1, 1, 2, 1, 4),
    (2, 1, 2, 1, 2),
]


def config(dims: Dims, **changes: Any) -> LlamaConfig:
    """Return the configuration of the Llama on a mesh."""
    fields = tiny_llama(
        vocab_size=252,
        intermediate_size=MLP,
        num_hidden_layers=2,
        rope_parameters=LLAMA3_ROPE,
        initializer_range=0.08,
    )
    del fields["model_type"]
    return LlamaConfig(**{**fields, "sharding_axis_dims": dims, **changes})


def batch() -> dict[str, np.ndarray]:
    """Return packed rows: three documents of different lengths and two tokens of padding."""
    ids = np.random.default_rng(0).integers(3, 252, (B, S))
    segments = [np.repeat([1, 2, 3, 0], [7 + i % 3, 9, 6 - i % 3, 2]) for i in range(B)]
    return {"input_ids": ids.astype(np.int32), "segment_ids": np.stack(segments).astype(np.int32)}


def rows_sharding(config: LlamaConfig) -> jax.sharding.NamedSharding:
    """Return the sharding of a batch [b, s]."""
    spec = config.partition_manager.resolve(("batch", "sequence"), "train", (B, S), config.mesh)
    return jax.sharding.NamedSharding(config.mesh, spec)


def abstract(config: LlamaConfig) -> LlamaForCausalLM:
    """Return the model without arrays."""
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(1)))


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return the canonical name of a parameter, with a placeholder for the layer number."""
    first = parameter_names.canonical(path)[0]
    return first.replace("layers.0.", "layers.*.") if parameter_names.is_stacked(path) else first


class Placed:
    """Values of the case on one mesh, with the compiled forward pass and gradient.

    Attributes:
        params: Name -> sharded parameter.
        program: Text of the compiled program.
        loss, logits, hidden: Results for the batch.
        gradients: Name -> gradient of the loss.
    """

    def __init__(self, model: LlamaForCausalLM, inputs: dict[str, jax.Array]):
        graphdef, params, other = model.split_module()
        names = [leaf_name(path) for path, _ in nnx.to_flat_state(params)]
        leaves, treedef = jax.tree.flatten(params)
        self.params = dict(zip(names, leaves, strict=True))

        def loss(leaves: list[jax.Array], inputs: dict[str, jax.Array]) -> Any:
            merged = model.merge_module(graphdef, jax.tree.unflatten(treedef, leaves), other)
            output, _ = merged.compute_loss(**inputs)
            hidden = output.last_hidden_state
            return output.loss, (merged.logits(hidden), hidden)

        gradient = jax.jit(
            jax.value_and_grad(loss, has_aux=True),
            out_shardings=(None, [leaf.sharding for leaf in leaves]),
        )
        compiled = gradient.lower(leaves, inputs).compile()
        self.program = compiled.as_text()
        (self.loss, (self.logits, self.hidden)), gradients = compiled(leaves, inputs)
        self.gradients = dict(zip(names, gradients, strict=True))


@cache
def weights() -> Any:
    """Return the parameters of one device as numpy arrays."""
    model = LlamaForCausalLM.create(config(ONE), seed=1)
    return jax.tree.map(np.asarray, nnx.state(model))


def place(dims: Dims, **changes: Any) -> Placed:
    """Compute the case on a mesh with the weights of one device."""
    own = config(dims, **changes).seal()
    graphdef, state = nnx.split(abstract(own))
    where = nnx.to_flat_state(placement.shardings(state, own))
    arrays = jax.device_put(jax.tree.leaves(weights()), [sharding for _, sharding in where])
    state = jax.tree.unflatten(jax.tree.structure(state), arrays)
    model = nnx.merge(graphdef, state)
    return Placed(model, placement.make_global(batch(), rows_sharding(own)))


@cache
def on_one_device() -> Placed:
    """Compute the values that every mesh must reproduce, compiled once."""
    return place(ONE)
