"""Vectors of whole sequences, from the body of any family.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from ed_infra.outputs import EmbeddingOutput
from jaxtyping import Array, Float, Int

from ed_models.module import EasyDeLBaseModule
from ed_models.tasks.pooling import Pooling


class Embedder(EasyDeLBaseModule):
    """A body whose call pools the hidden states of each row: a mixin in front of a body class.

    The parameters and files are those of the body alone, with the files of sentence-transformers
    beside them. `pooling` says how rows are pooled; it is read from the checkpoint.
    """

    pooling: Pooling = Pooling()

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        position_ids: Int[Array, "b s"] | None = None,
        key: jax.Array | None = None,
    ) -> EmbeddingOutput:
        """Turn each row into a vector.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` [b, s, d] instead.
            attention_mask: nonzero = a token, [b, s]; padding is not pooled.
            position_ids: rotary positions; default: count the tokens of a row.
            key: dropout key; None = deterministic.
        """
        body: Any = super().__call__(  # type: ignore[misc]
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            key=key,
        )
        return EmbeddingOutput(
            embeddings=self.pooling(body.last_hidden_state, attention_mask),
            last_hidden_state=body.last_hidden_state,
            losses=body.losses,
            aux=body.aux,
            updates=body.updates,
        )

    @classmethod
    def read_settings(cls, directory: Path) -> dict[str, object]:
        """How rows are pooled, beside the settings that every module has."""
        return {
            **super().read_settings(directory),
            "pooling": Pooling.read(directory) or Pooling(),
        }

    def write_settings(self, directory: Path) -> None:
        """Write how rows are pooled, beside the settings that every module has."""
        super().write_settings(directory)
        body: Any = self
        self.pooling.write(directory, body.embed_tokens.embedding.shape[-1])
