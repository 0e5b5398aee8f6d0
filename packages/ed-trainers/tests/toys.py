"""A model and a loader small enough that most tests of the loop compile in a second."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.outputs import CausalLMOutput
from ed_infra.sharding import placement
from ed_infra.sharding.mesh import create_mesh
from ed_infra.sharding.partition import PartitionManager
from ed_layers.projections.head import Head
from flax import nnx

VOCAB, HIDDEN = 32, 16


class ToyConfig:
    """The parts of a config that trainers read; hashable, as sealed configs are."""

    batch_invariant = False

    def __init__(self, dims=(1, 1, 1, 1, 1)):
        self.mesh = create_mesh(dims)
        self.partition_manager = PartitionManager()


class ToyModel(nnx.Module):
    """Embedding, mean over the past, norm, head: one parameter of each kind for optimizers."""

    input_names = ("input_ids", "segment_ids", "position_ids")

    def __init__(self, config: ToyConfig, *, param_dtype=jnp.float32, seed: int = 0, dropout=0.0):
        keys = jax.random.split(jax.random.key(seed), 2)
        self.config = config
        self.dropout = dropout

        def normal(key, shape):
            return jax.random.normal(key, shape, param_dtype) * 0.1

        self.embed_tokens = nnx.Param(normal(keys[0], (VOCAB, HIDDEN)), axes=("vocab", "embed"))
        self.norm = nnx.Param(jnp.ones((HIDDEN,), param_dtype), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros((HIDDEN,), param_dtype), axes=("norm",))
        self.kernel = nnx.Param(normal(keys[1], (HIDDEN, VOCAB)), axes=("embed", "vocab"))

    def split_module(self):
        return nnx.split(self, nnx.Param, ...)

    def shard_model(self):
        return placement.shard(self, self.config.partition_manager, mesh=self.config.mesh)

    def head(self):
        return Head(self.kernel[...])

    def __call__(
        self,
        input_ids,
        *,
        segment_ids,
        position_ids,
        inputs_embeds=None,
        logits_at="all",
        key=None,
    ):
        x = inputs_embeds
        if x is None:
            x = self.embed_tokens[...].astype(jnp.float32)[input_ids]
        s = input_ids.shape[1]
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        past = jnp.where(same & jnp.tri(s, dtype=bool), 1.0, 0.0)
        x = x + past @ x / jnp.sum(past, -1, keepdims=True)
        x = x * self.norm[...] + self.bias[...] + 0.01 * position_ids[..., None]
        if key is not None and self.dropout:
            x = x * jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return CausalLMOutput(last_hidden_state=x)

    def save_pretrained(self, directory):
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / "config.json").write_text("{}")


class ToyLoader:
    """Rows of unequal length, a pure function of the step; the next token is often predictable."""

    def __init__(self, rows=8, length=16, steps=20, seed=0):
        self.rows, self.length, self.seed = rows, length, seed
        self.steps_per_epoch = steps
        self.fingerprint = f"toy-{rows}-{length}-{seed}"

    def batch_at(self, step):
        random = np.random.default_rng((self.seed, step))
        ids = random.integers(1, VOCAB, (self.rows, self.length)).astype(np.int32)
        ids[:, 1::2] = (ids[:, ::2] * 5 + 3) % VOCAB
        lengths = random.integers(2, self.length + 1, self.rows)
        real = np.arange(self.length) < lengths[:, None]
        ids[~real] = 0
        return {
            "input_ids": ids,
            "labels": np.where(real, ids, -100).astype(np.int32),
            "segment_ids": real.astype(np.int32),
            "position_ids": np.where(real, np.arange(self.length), 0).astype(np.int32),
        }
