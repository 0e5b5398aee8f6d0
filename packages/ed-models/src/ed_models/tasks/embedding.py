"""Sequence embeddings from the body of any family.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic

import jax
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import EmbeddingOutput
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.checkpoints.embedding_settings import EmbeddingSettings
from ed_models.checkpoints.task_rules import body_rules
from ed_models.tasks.head_model import BodyT, HeadModel, task_class
from ed_models.tasks.pooling import Pooling
from ed_models.tasks.sentence_modules import Dense, SentenceModules, Transform


class Embedder(EasyDeLBaseModule, Generic[BodyT]):
    """A mixin in front of a body class: the call pools the hidden states of each row.

    The parameters and files are those of the body, plus the files of sentence-transformers.

    Attributes:
        pooling: the pooling method of the checkpoint.
        transforms: modules of the checkpoint between the pooling and the last normalization.
        embedding_settings: prompts and lengths of texts, and the size of the vectors.
    """

    pooling: Pooling = Pooling()
    transforms: Sequence[Transform] = ()
    embedding_settings: EmbeddingSettings = EmbeddingSettings()
    can_have_mtp_head = False

    @classmethod
    def for_family(cls, family: type[HeadModel[BodyT]]) -> type[Embedder[BodyT]]:
        """Return the embedder whose base class is the body of a family."""
        body = family.DERIVED.get(TaskType.BASE_MODULE, derive_body_class)(family)
        doc = f"{Embedder.__doc__}\n\nThe body is that of `{family.__name__}`."
        content = {"__doc__": doc, "architecture": body.__name__}  # files name the body
        metaclass: Any = type(Embedder)
        embedder_class = metaclass("Embedder", (Embedder, body), content)
        return task_class(embedder_class, family, "ForEmbedding")

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        segments: int | None = None,
        position_ids: Int[Array, "b s"] | None = None,
        prompt_length: Int[Array, " b"] | Int[Array, "b n"] | int | None = None,
        key: jax.Array | None = None,
        **inputs: Any,
    ) -> EmbeddingOutput:
        """Compute the embedding of each row, or of each text packed into a row.

        The modules of the checkpoint follow the pooling. With a `truncate_dim`, a vector is
        truncated, and then normalized if `pooling.normalize` is set.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` [b, s, d] instead.
            attention_mask: nonzero = a token, [b, s]; padding is not pooled.
            segment_ids: packed texts 1, 2, ...; 0 = padding; requires `segments`.
            segments: maximum number of texts packed into a row. The embeddings have shape
                [b, segments, d]; entries without a text have no meaning.
            position_ids: rotary positions; default: token index within the row (the segment).
            prompt_length: number of tokens of the prompt at the start of each row [b], or of each
                packed text [b, segments]. The value matters only for a checkpoint with
                `include_prompt: false`, which does not pool the prompt.
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
        body = super().__call__(
            input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            key=key,
            **inputs,
        )
        hidden = body.last_hidden_state
        prompt = None if self.embedding_settings.include_prompt else prompt_length
        pooling = replace(self.pooling, normalize=False)
        if segment_ids is None or segments is None:
            vectors = pooling(hidden, attention_mask, prompt)
        else:
            vectors = pooling.pool_segments(hidden, segment_ids, segments, prompt)
        for transform in self.transforms:
            vectors = transform(vectors)
        vectors = vectors[..., : self.embedding_settings.truncate_dim]
        return EmbeddingOutput(
            embeddings=self.pooling.normalize_vectors(vectors),
            last_hidden_state=hidden,
            losses=body.losses,
            aux=body.aux,
            updates=body.updates,
        )

    @property
    def embedding_dimension(self) -> int:
        """Number of elements of an embedding."""
        return min(self._whole_dimension, self.embedding_settings.truncate_dim or 2**31)

    @property
    def _whole_dimension(self) -> int:
        """Number of elements of a vector before it is truncated."""
        body: Any = self
        dense = [layer for layer in self.transforms if isinstance(layer, Dense)]
        return dense[-1].features if dense else body.features * len(self.pooling.modes)

    def truncate_embeddings(self, truncate_dim: int) -> None:
        """Keep the first elements of each vector (Matryoshka); a saved checkpoint does the same.

        Args:
            truncate_dim: number of elements, at most the size of the vectors.

        Raises:
            ConfigError: the vectors have fewer elements, or the number is not positive.
        """
        settings = self.embedding_settings.replace_truncate_dim(truncate_dim)
        if truncate_dim > self._whole_dimension:
            raise ConfigError(
                f"truncate_dim={truncate_dim} exceeds the {self._whole_dimension} elements of the "
                "vectors: choose a smaller number"
            )
        self.embedding_settings = settings

    @classmethod
    def read_settings(
        cls, directory: Path, *, allow_pickle: bool = False, check_finite: bool = True
    ) -> dict[str, object]:
        """Return the settings of every module, plus the files of sentence-transformers."""
        modules = SentenceModules.read(
            directory, allow_pickle=allow_pickle, check_finite=check_finite
        ) or SentenceModules(Pooling())
        return {
            **super().read_settings(directory),
            "pooling": modules.pooling,
            **({"transforms": nnx.List(modules.transforms)} if modules.transforms else {}),
            "embedding_settings": EmbeddingSettings.read(
                directory, include_prompt=modules.include_prompt
            ),
        }

    @property
    def sentence_modules(self) -> SentenceModules:
        """The modules after the body."""
        include_prompt = self.embedding_settings.include_prompt
        return SentenceModules(self.pooling, include_prompt, self.transforms)

    def write_settings(self, directory: Path) -> None:
        """Write the settings of every module, plus the files of sentence-transformers."""
        super().write_settings(directory)
        body: Any = self
        self.sentence_modules.write(directory, body.features)
        self.embedding_settings.write(directory)

    def separate_tensors(self) -> Mapping[str, Mapping[str, jax.Array]]:
        """Return the weights of the modules after the body."""
        return self.sentence_modules.tensors()


def derive_body_class(family: type[Any]) -> type[Any]:
    """Return the class of the body of a family."""
    body = family.body_class
    if getattr(body, "head_class", family) is family:
        return body
    # The body belongs to another family: its names follow from the rules of this family.
    content = {"__doc__": body.__doc__, "WEIGHTS": body_rules(family.WEIGHTS)}
    body_class = type(body)(body.__name__, (body,), content)
    name = body.__name__
    body_class = task_class(body_class, family, "")
    body_class.__name__ = body_class.__qualname__ = name
    return body_class
