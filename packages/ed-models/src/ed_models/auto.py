"""Configurations and models by the `model_type` in config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError
from flax import nnx
from jax.typing import DTypeLike

from ed_models.base.module import EasyDeLBaseModule
from ed_models.checkpoints import hub
from ed_models.checkpoints.checks import detect_task
from ed_models.tasks.audio_classification import AudioClassifier
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.classification import SequenceClassifier
from ed_models.tasks.conditional import ConditionalLM
from ed_models.tasks.ctc import CTCModel
from ed_models.tasks.embedding import Embedder
from ed_models.tasks.encoders import MaskedLM, MultipleChoice, QuestionAnswerer, TokenClassifier
from ed_models.tasks.image_classification import ImageClassifier
from ed_models.tasks.image_text_match import ImageTextMatcher
from ed_models.tasks.pooling import Pooling
from ed_models.tasks.seq2seq import Seq2SeqLM

_ModelT = TypeVar("_ModelT", bound=EasyDeLBaseModule)
_OF_HUB = frozenset(hub.HubOptions.__annotations__)


class AutoEasyDeLConfig:
    """Reads a configuration of any registered model type."""

    def __init__(self) -> None:
        raise TypeError(
            "AutoEasyDeLConfig has no instances: use AutoEasyDeLConfig.from_pretrained(...)"
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        **options: Any,
    ) -> EasyDeLBaseConfig:
        """Read config.json from a directory or a hub repository.

        Args:
            name_or_path: the directory or repository.
            options: the options of `ed_models.checkpoints.hub.HubOptions`; all other names are
                fields that replace the values of the file. Unknown names raise an error.

        Raises:
            CheckpointError: no readable config.json.
            RegistryError: the model type is not registered.
        """
        changes = {name: value for name, value in options.items() if name not in _OF_HUB}
        hub_options = {name: value for name, value in options.items() if name in _OF_HUB}
        directory = hub.resolve(name_or_path, weights=False, **hub_options)
        return hub.read_config(directory, **changes)

    @classmethod
    def for_model(cls, model_type: str, **fields: object) -> EasyDeLBaseConfig:
        """Create a configuration to train from scratch.

        Args:
            model_type: a registered model type, as in config.json.
            fields: architecture and execution fields; unknown names raise an error.

        Raises:
            RegistryError: the model type is not registered.
        """
        return registry.get_config(model_type)(**fields)


class _AutoModel(Generic[_ModelT]):
    """Base of the task classes; the classmethods select a class by the model type."""

    task: ClassVar[TaskType]

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(
            f"{name} has no instances: use {name}.from_pretrained(...) or .from_config(...)"
        )

    @classmethod
    def from_config(
        cls,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.bfloat16,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs | None = None,
        seed: int = 0,
    ) -> _ModelT:
        """Create a model with random parameters on its devices.

        Args:
            config: the model type, the architecture and the mesh.
            dtype, param_dtype: dtype of computation and of stored parameters.
            precision: precision of matrix products.
            rngs: the `params` stream provides the seed.
            seed: seed of the parameters if `rngs` is None.
        """
        if not isinstance(config, EasyDeLBaseConfig):
            raise ConfigError(
                f"from_config requires an EasyDeL configuration, got {type(config).__name__}: "
                "create one with AutoEasyDeLConfig.from_pretrained(...)"
            )
        if rngs is not None:
            seed = int(jax.random.randint(rngs.params(), (), 0, 2**31 - 1))
        return registry.get_module(cls.task, config.model_type).create(
            config,
            seed=seed,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
        )

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> _ModelT:
        """Load a directory or a hub repository; options: see `hub.from_pretrained`."""
        return hub.from_pretrained(name_or_path, task=cls.task, **options)


class AutoEasyDeLModelForCausalLM(_AutoModel[CausalLM]):
    """Decoder language models."""

    task = TaskType.CAUSAL_LM


class AutoEasyDeLModelForSeq2SeqLM(_AutoModel[Seq2SeqLM]):
    """Encoder-decoder language models."""

    task = TaskType.SEQUENCE_TO_SEQUENCE


class AutoEasyDeLModelForSpeechSeq2Seq(_AutoModel[Seq2SeqLM]):
    """Encoder-decoders that read speech and write text."""

    task = TaskType.SPEECH_SEQUENCE_TO_SEQUENCE


class AutoEasyDeLModelForCTC(_AutoModel[CTCModel]):
    """Encoders of speech that score the labels of every time step."""

    task = TaskType.CTC


class AutoEasyDeLModelForAudioClassification(_AutoModel[AudioClassifier]):
    """Encoders of speech that score the labels of recordings."""

    task = TaskType.AUDIO_CLASSIFICATION


class AutoEasyDeLModelForImageTextToText(_AutoModel[ConditionalLM]):
    """Vision-language models: images and text in, text out."""

    task = TaskType.IMAGE_TEXT_TO_TEXT


class AutoEasyDeLAnyToAnyModel(_AutoModel[ConditionalLM]):
    """Models of several media, such as audio-language models: recordings and text in, text out."""

    task = TaskType.ANY_TO_ANY


class AutoEasyDeLModel(_AutoModel[EasyDeLBaseModule]):
    """Bodies without a head: tokens to hidden states."""

    task = TaskType.BASE_MODULE


class AutoEasyDeLVisionModel(_AutoModel[EasyDeLBaseModule]):
    """Vision towers without a head: images to hidden states."""

    task = TaskType.BASE_VISION


class AutoEasyDeLModelForImageClassification(_AutoModel[ImageClassifier]):
    """Vision towers with a head that classifies images; the configuration has `num_labels`."""

    task = TaskType.IMAGE_CLASSIFICATION


class AutoEasyDeLModelForZeroShotImageClassification(_AutoModel[ImageTextMatcher]):
    """Models that compare images with texts (CLIP, SigLIP)."""

    task = TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION


class AutoEasyDeLModelForSequenceClassification(_AutoModel[SequenceClassifier]):
    """Bodies with a head that classifies sequences; the configuration has `num_labels`."""

    task = TaskType.SEQUENCE_CLASSIFICATION


class AutoEasyDeLModelForMaskedLM(_AutoModel[MaskedLM]):
    """Encoders that predict masked tokens."""

    task = TaskType.MASKED_LM


class AutoEasyDeLModelForTokenClassification(_AutoModel[TokenClassifier]):
    """Encoders that classify every token; the configuration has `num_labels`."""

    task = TaskType.TOKEN_CLASSIFICATION


class AutoEasyDeLModelForQuestionAnswering(_AutoModel[QuestionAnswerer]):
    """Encoders that find the answer to a question in a text."""

    task = TaskType.QUESTION_ANSWERING


class AutoEasyDeLModelForMultipleChoice(_AutoModel[MultipleChoice]):
    """Encoders that score several texts of a row."""

    task = TaskType.MULTIPLE_CHOICE


class AutoEasyDeLModelForReward(_AutoModel[SequenceClassifier]):
    """Reward models: classifiers with one label, whose logit [b, 1] is the reward.

    A checkpoint of another task gets a new head with one label. A classifier with several labels
    raises an error.
    """

    task = TaskType.SEQUENCE_CLASSIFICATION

    @classmethod
    def from_config(
        cls, config: EasyDeLBaseConfig, *args: Any, **options: object
    ) -> SequenceClassifier:
        """Create a reward model with random parameters; arguments as for other tasks."""
        if isinstance(config, EasyDeLBaseConfig):
            config = config.replace(num_labels=1)
        return super().from_config(config, *args, **options)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> SequenceClassifier:
        """Load a directory or a hub repository; options: see `hub.from_pretrained`."""
        hub_options = {name: options[name] for name in _OF_HUB if name in options}
        directory = hub.resolve(name_or_path, weights=False, **hub_options)
        if detect_task(directory) == cls.task:
            labels = hub.read_config(directory).num_labels
            if labels != 1:
                raise CheckpointError(
                    f"{directory} is a classifier with {labels} labels, but a reward model has "
                    "one: load it with AutoEasyDeLModelForSequenceClassification"
                )
        given = options.pop("num_labels", 1)
        if given != 1:
            raise ConfigError(f"a reward model has one label, got num_labels={given!r}: omit it")
        changes = {**(options.pop("config_kwargs", None) or {}), "num_labels": 1}
        return super().from_pretrained(name_or_path, config_kwargs=changes, **options)


class AutoEasyDeLModelForEmbedding(_AutoModel[Embedder]):
    """Bodies that turn whole sequences into vectors, as sentence-transformers does."""

    task = TaskType.EMBEDDING

    @classmethod
    def from_config(
        cls,
        config: EasyDeLBaseConfig,
        *args: Any,
        pooling_mode: str = "mean",
        normalize: bool = False,
        **options: object,
    ) -> Embedder:
        """Create an embedding model with random parameters.

        Args:
            config, args, options: as for other tasks.
            pooling_mode, normalize: see `ed_models.tasks.pooling.Pooling`.
        """
        pooling = Pooling.of(pooling_mode, normalize)
        model = super().from_config(config, *args, **options)
        model.pooling = pooling
        return model

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        pooling_mode: str | None = None,
        normalize: bool | None = None,
        **options: Any,
    ) -> Embedder:
        """Load a directory or a hub repository.

        Args:
            name_or_path, options: see `ed_models.checkpoints.hub.from_pretrained`.
            pooling_mode, normalize: replace the settings of the checkpoint. The default without
                settings is the mean of the tokens, not normalized.
        """
        if pooling_mode is not None:
            Pooling.of(pooling_mode)  # Validate the name before anything is loaded.
        model = super().from_pretrained(name_or_path, **options)
        stored = model.pooling
        model.pooling = Pooling.of(
            stored.mode if pooling_mode is None else pooling_mode,
            stored.normalize if normalize is None else normalize,
        )
        return model
