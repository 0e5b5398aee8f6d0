"""Sequence embeddings from the body of any family.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic

import jax
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import EmbeddingOutput
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.checkpoints.task_rules import body_rules
from ed_models.tasks.head_model import BodyT, HeadModel, task_class
from ed_models.tasks.pooling import Pooling


class Embedder(EasyDeLBaseModule, Generic[BodyT]):
    """A mixin in front of a body class: the call pools the hidden states of each row.

    The parameters and files are those of the body, plus the files of sentence-transformers.
    `pooling` is the pooling method, which is read from the checkpoint.
    """

    pooling: Pooling = Pooling()

    @classmethod
    def for_family(cls, family: type[HeadModel[BodyT]]) -> type[Embedder[BodyT]]:
        """Return the embedder whose base class is the body of a family."""
        body = family.DERIVED.get(TaskType.BASE_MODULE, body_of)(family)
        doc = f"{Embedder.__doc__}\n\nThe body is that of `{family.__name__}`."
        content = {"__doc__": doc, "architecture": body.__name__}  # files name the body
        metaclass: Any = type(Embedder)
        made = metaclass("Embedder", (Embedder, body), content)
        return task_class(made, family, "ForEmbedding")

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        segments: int | None = None,
        position_ids: Int[Array, "b s"] | None = None,
        key: jax.Array | None = None,
        **inputs: Any,
    ) -> EmbeddingOutput:
        """Compute the embedding of each row, or of each text packed into a row.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` [b, s, d] instead.
            attention_mask: nonzero = a token, [b, s]; padding is not pooled.
            segment_ids: packed texts 1, 2, ...; 0 = padding; requires `segments`.
            segments: maximum number of texts packed into a row. The embeddings have shape
                [b, segments, d]; entries without a text have no meaning.
            position_ids: rotary positions; default: token index within the row (the segment).
            key: dropout key; None = deterministic.
            inputs: further arrays that the body reads, such as `token_type_ids`.

        Raises:
            ConfigError: only one of `segment_ids` and `segments` is given.
        """
        if (segment_ids is None) != (segments is None):
            raise ConfigError(
                "segment_ids and segments must be passed together: segments is the number of texts "
                "in a row"
            )
        body: Any = super().__call__(  # type: ignore[misc]
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            key=key,
            **inputs,
        )
        hidden = body.last_hidden_state
        if segment_ids is None or segments is None:
            embeddings = self.pooling(hidden, attention_mask)
        else:
            embeddings = self.pooling.of_segments(hidden, segment_ids, segments)
        return EmbeddingOutput(
            embeddings=embeddings,
            last_hidden_state=hidden,
            losses=body.losses,
            aux=body.aux,
            updates=body.updates,
        )

    @classmethod
    def read_settings(cls, directory: Path) -> dict[str, object]:
        """Return the settings of every module, plus the pooling method."""
        return {
            **super().read_settings(directory),
            "pooling": Pooling.read(directory) or Pooling(),
        }

    def write_settings(self, directory: Path) -> None:
        """Write the settings of every module, plus the pooling method."""
        super().write_settings(directory)
        body: Any = self
        self.pooling.write(directory, body.features)


def body_of(family: type[Any]) -> type[Any]:
    """Return the class of the body of a family."""
    body = family.body_class
    if getattr(body, "head_class", family) is family:
        return body
    # The body belongs to another family: its names follow from the rules of this family.
    content = {"__doc__": body.__doc__, "WEIGHTS": body_rules(family.WEIGHTS)}
    made: Any = type(body)(body.__name__, (body,), content)
    name = body.__name__
    made = task_class(made, family, "")
    made.__name__ = made.__qualname__ = name
    return made
