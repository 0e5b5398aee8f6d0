"""`EngineFacts`: what a server must know about the model of an engine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from ed_infra.enums import TaskType
from ed_layers.quantization.qarray import QArray
from ed_models.checkpoints.embedding_settings import EmbeddingSettings
from ed_models.modalities.audio import RecordingForm
from flax import nnx

from ed_esurge.config import SamplingDefaults
from ed_esurge.outputs import LabelSet


@dataclass(frozen=True)
class EngineFacts:
    """What a server must know about the model of an engine.

    Attributes:
        model_name: default name of the model.
        max_model_len: maximum number of tokens of prompt plus completion.
        vocab_size: size of the vocabulary.
        eos_token_ids: end-of-sequence tokens of the model.
        input_names: names of the arrays that the model accepts.
        task: task of the model.
        labels: labels of a classifier.
        embedding_settings: prompts of an embedding model.
        recording_form: the recordings that the model reads; None if it reads none.
        certificate: summary of the certificate of the model, see `ed_esurge.certificates`.
        sampling_defaults: sampling options of generation_config.json.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    input_names: tuple[str, ...]
    task: TaskType
    labels: LabelSet | None
    embedding_settings: EmbeddingSettings | None
    recording_form: RecordingForm | None
    certificate: Mapping[str, Any] | None
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    def differing_names(self, other: EngineFacts) -> list[str]:
        """Return the names of the facts that two engines of one model do not share.

        The certificate may differ, because the weights of the server may have been replaced.
        """
        names = self.__dataclass_fields__.keys() - {"certificate"}
        return sorted(name for name in names if getattr(self, name) != getattr(other, name))


def describe_dtypes(model: object) -> str:
    """Return the format of most weights of a model, and the dtype of its computation."""
    sizes: Counter[str] = Counter()
    for leaf in jax.tree.leaves(nnx.state(model), is_leaf=lambda one: isinstance(one, QArray)):
        if isinstance(leaf, QArray):
            sizes[f"{leaf.format}{'_a8' if leaf.activations else ''}"] += math.prod(leaf.shape)
        elif not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            sizes[str(leaf.dtype)] += leaf.size
    weights = sizes.most_common(1)[0][0] if sizes else "no"
    computation = getattr(model, "dtype", None)
    name = weights if computation is None else jax.numpy.dtype(computation).name
    return f"{weights} weights" + (f", {name} computation" if name != weights else "")


class EngineWithFacts(ABC):
    """Base class of engines: the fields of `facts` are also attributes of the engine."""

    @property
    @abstractmethod
    def facts(self) -> EngineFacts:
        """The facts about the model of the engine."""

    @property
    def model_name(self) -> str:
        return self.facts.model_name

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.facts.eos_token_ids

    @property
    def input_names(self) -> tuple[str, ...]:
        return self.facts.input_names

    @property
    def task(self) -> TaskType:
        return self.facts.task

    @property
    def labels(self) -> LabelSet | None:
        return self.facts.labels

    @property
    def embedding_settings(self) -> EmbeddingSettings | None:
        return self.facts.embedding_settings

    @property
    def recording_form(self) -> RecordingForm | None:
        return self.facts.recording_form

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        return self.facts.certificate

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self.facts.sampling_defaults
