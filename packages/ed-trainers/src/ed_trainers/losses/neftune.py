"""NEFTune: noise on the embeddings of training tokens (Jain et al. 2023, arXiv 2310.05914).

Legend: b sequences, s positions, d hidden.
"""

from __future__ import annotations

import zlib
from typing import Protocol, cast

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from jaxtyping import Array, Float, Int

from ed_trainers.contract import Batch


class Embeds(Protocol):
    """The embedding table of a model's body."""

    def __call__(self, input_ids: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """Return the embeddings of tokens."""
        ...


def noisy_embeddings(
    model: LanguageModel, batch: Batch, key: jax.Array, *, alpha: float
) -> Float[Array, "b s d"]:
    """Return the embeddings of a batch with uniform noise of the size `alpha / sqrt(n d)`.

    n is the number of tokens of a position's own segment, so packing does not change the noise of a
    document. Padding gets no noise.

    Args:
        model: a model with the embedding table `model.embed_tokens`.
        batch: `input_ids`, `segment_ids` [b, s]; for an encoder-decoder, those of the encoder.
        key: random key of the noise of this microbatch.
        alpha: the paper's alpha, usually 5 to 15.

    Raises:
        ConfigError: the model has no such table, or reads recordings.
    """
    if "input_ids" not in batch:
        raise ConfigError(
            f"neftune_noise_alpha adds noise to embeddings of tokens, and {type(model).__name__} "
            "reads recordings: omit neftune_noise_alpha"
        )
    embeds = token_table(model)(batch["input_ids"])
    noise_key = jax.random.fold_in(key, zlib.crc32(b"neftune"))
    # One key per row: the noise of a row does not depend on the number of rows.
    rows = jax.vmap(lambda row: jax.random.fold_in(noise_key, row))(jnp.arange(embeds.shape[0]))
    noise = jax.vmap(lambda k: jax.random.uniform(k, embeds.shape[1:], minval=-1.0))(rows)
    lengths = segment_lengths(batch["segment_ids"])
    size = alpha / jnp.sqrt(jnp.maximum(lengths, 1) * embeds.shape[-1])
    size = jnp.where(lengths > 0, size, 0.0)
    return embeds + (noise * size[..., None]).astype(embeds.dtype)


def segment_lengths(segment_ids: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Return the number of tokens of each position's segment; 0 in padding."""
    rows = jnp.arange(segment_ids.shape[0])[:, None]
    counts = jnp.zeros((segment_ids.shape[0], segment_ids.shape[1] + 1), jnp.int32)
    counts = counts.at[rows, segment_ids].add(1, mode="drop")
    return jnp.where(segment_ids > 0, jnp.take_along_axis(counts, segment_ids, axis=1), 0)


def token_table(model: LanguageModel) -> Embeds:
    """Return the embedding table, `model.model.embed_tokens`.

    Raises:
        ConfigError: the model has no such table.
    """
    table = getattr(getattr(model, "model", None), "embed_tokens", None)
    if not callable(table):
        raise ConfigError(
            f"neftune_noise_alpha adds noise to model.embed_tokens, which {type(model).__name__} "
            "lacks: omit neftune_noise_alpha"
        )
    return cast(Embeds, table)
