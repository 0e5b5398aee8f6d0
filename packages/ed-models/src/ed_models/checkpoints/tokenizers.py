"""The tokenizer or processor of a checkpoint, as `transformers` loads it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ed_infra.chats import read_chat_template
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.package_files import is_package_address

from ed_models.checkpoints.embedding_settings import TRANSFORMER_NAME, EmbeddingSettings
from ed_models.checkpoints.gguf.directory import ENDING as GGUF
from ed_models.checkpoints.hub import resolve
from ed_models.generation.prompts import longest_sequence
from ed_models.protocol import LanguageModel

if TYPE_CHECKING:
    from transformers import (
        BaseImageProcessor,
        FeatureExtractionMixin,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )


class AudioTextProcessor:
    """A feature extractor and a tokenizer, whose chat template writes a token for a recording.

    `VoxtralProcessor` of transformers requires torch, although both parts do not. The files of a
    checkpoint are those of the parts.
    """

    def __init__(
        self, feature_extractor: FeatureExtractionMixin, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.feature_extractor, self.tokenizer = feature_extractor, tokenizer

    @property
    def chat_template(self) -> object:
        """The template of the tokenizer."""
        return self.tokenizer.chat_template

    @chat_template.setter
    def chat_template(self, text: str) -> None:
        self.tokenizer.chat_template = text

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the files of both parts, as `transformers` reads them."""
        self.feature_extractor.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)


#: Part of a processor that needs torchvision.
_VIDEOS = "video_processor"


def load_tokenizer(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or a hub repository.

    A checkpoint of sentence-transformers with `do_lower_case` has a tokenizer that converts texts
    to lower case.

    Args:
        name: The directory or repository, or a GGUF file.
        revision: The branch, tag or commit of a repository.
        trust_remote_code: Whether the repository may run its own Python code.
        chat_template: See `set_chat_template`. None keeps the template of the tokenizer.

    Raises:
        CheckpointError: There is no tokenizer.
        ConfigError: The chat template cannot be read.
    """
    from transformers import AutoTokenizer

    if str(name).endswith(GGUF) or is_package_address(name) or Path(name).is_dir():
        name = str(resolve(name, weights=False, revision=revision))
    tokenizer = _load(AutoTokenizer, "tokenizer", name, revision, trust_remote_code)
    _set_lower_case(tokenizer, name, revision)
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def _set_lower_case(tokenizer: PreTrainedTokenizerBase, name: str, revision: str | None) -> None:
    """Add a normalizer for lower case if the settings of sentence-transformers require one."""
    from tokenizers import normalizers
    from transformers.utils.hub import cached_file

    settings = cached_file(
        name,
        TRANSFORMER_NAME,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if settings is None:
        return
    if not EmbeddingSettings.read(Path(settings).parent).do_lower_case:
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(
            f"{settings} has do_lower_case, which requires a fast tokenizer: add a tokenizer.json"
        )
    existing_normalizers = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *existing_normalizers])


def load_processor(
    name: str,
    *,
    part: Literal["image_processor", "feature_extractor"] = "image_processor",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ProcessorMixin:
    """Load the processor of a model: its tokenizer, and its processor of images or audio.

    Args:
        name: The directory or repository.
        part: The part that the processor must have; audio has a feature extractor.
        revision: The branch, tag or commit of a repository.
        trust_remote_code: Whether the repository may run its own Python code.

    Raises:
        CheckpointError: There is no processor.
    """
    from transformers import AutoProcessor

    kind = _without_torchvision(name, revision) or AutoProcessor
    processor = _load(kind, "processor", name, revision, trust_remote_code)
    _add_videos(processor, name, revision)
    if not hasattr(processor, part):
        raise CheckpointError(
            f"{name!r} has a tokenizer, but no {part.replace('_', ' ')}: add the files that "
            "`AutoProcessor.save_pretrained` writes"
        )
    return processor


def _add_videos(processor: ProcessorMixin, name: str, revision: str | None) -> None:
    """Set the video processor of this package, if it has one for the class of a processor.

    A checkpoint without settings of videos has patches of the size of those of its images.
    """
    if not hasattr(processor, "image_processor"):
        return
    from transformers import PretrainedConfig

    from ed_models.checkpoints.video_processor import VIDEO_PROCESSORS

    kind = VIDEO_PROCESSORS.get(type(processor).__name__)
    if kind is not None:
        try:
            video_processor = _load(kind, "video processor", name, revision, False)
        except CheckpointError:
            images = vars(processor)["image_processor"]
            sizes = ("patch_size", "merge_size", "temporal_patch_size")
            video_processor = kind(**{size: getattr(images, size) for size in sizes})
        options: dict[str, Any] = {"revision": revision} if revision else {}
        try:
            stored, _ = PretrainedConfig.get_config_dict(name, **options)
        except (OSError, ValueError):
            stored = {}
        video_processor.set_rate((stored.get("vision_config") or {}).get("tokens_per_second"))
        setattr(processor, _VIDEOS, video_processor)


def _without_torchvision(name: str, revision: str | None) -> type[Any] | None:
    """Return the class of a processor that `transformers` would create with torchvision.

    `transformers` reads videos with torchvision, so a processor of images, text and videos is
    created without its videos; `load_processor` then adds those of this package. The processors of
    Pixtral, Kimi K2.5 and Command A Vision are those of this package.

    Returns:
        None if torchvision is installed, or if the processor does not need it.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return None
    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        stored, _ = transformers.PretrainedConfig.get_config_dict(name, **options)
    except (OSError, ValueError):
        return None  # the error of AutoProcessor tells more
    class_name = PROCESSOR_MAPPING_NAMES.get(str(stored.get("model_type")))
    reads_pixtral = (stored.get("vision_config") or {}).get("model_type") == "pixtral"
    if reads_pixtral and class_name != "LightOnOcrProcessor":
        from ed_models.checkpoints.pixtral_processor import PixtralProcessor

        return PixtralProcessor
    if stored.get("model_type") == "kimi_k25":
        from ed_models.checkpoints.kimi_processor import Kimi_K25Processor

        return Kimi_K25Processor
    if stored.get("model_type") == "cohere2_vision":
        from ed_models.checkpoints.cohere_processor import Cohere2VisionProcessor

        return Cohere2VisionProcessor
    kind = getattr(transformers, class_name, None) if class_name else None
    if kind is None or _VIDEOS not in kind.get_attributes():
        return None
    return without_videos(kind)


def without_videos(kind: type[Any]) -> type[Any]:
    """Return a class of processors as one of `transformers`, but without its part for videos.

    The class keeps the name and `__init__`, whose arguments tell transformers which saved settings
    to pass. `transformers` calls `__init__` with the parts of the processor in order.
    """
    from transformers import ProcessorMixin

    parts: list[str] = kind.get_attributes()

    class WithoutVideos(ProcessorMixin):
        def __init__(self, *args: object, **options: object) -> None:
            options.pop(_VIDEOS, None)
            given = [value for name, value in zip(parts, args, strict=False) if name != _VIDEOS]
            super().__init__(*given, **options)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in parts if name != _VIDEOS]

        @classmethod
        def from_args_and_dict(
            cls, args: Sequence[Any], processor_dict: dict[str, Any], **options: object
        ) -> Any:
            place = parts.index(_VIDEOS)
            args = [*args[:place], None, *args[place:]]
            return super().from_args_and_dict(args, processor_dict, **options)

    return type(kind.__name__, (kind, WithoutVideos), {"__module__": kind.__module__})


def load_audio_processor(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> AudioTextProcessor:
    """Load the processor of an audio-language model; arguments as of `load_processor`.

    Raises:
        CheckpointError: There is no feature extractor or no tokenizer.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    return AudioTextProcessor(
        load_feature_extractor(name, **options), load_tokenizer(name, **options)
    )


def load_image_processor(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> BaseImageProcessor:
    """Load the image processor of a model without text; arguments as of `load_processor`.

    Raises:
        CheckpointError: There is no image processor.
    """
    from transformers import AutoImageProcessor

    return _load(AutoImageProcessor, "image processor", name, revision, trust_remote_code)


def load_feature_extractor(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> FeatureExtractionMixin:
    """Load the feature extractor of a model that reads recordings; arguments as of
    `load_processor`.

    Raises:
        CheckpointError: There is no feature extractor.
    """
    from transformers import AutoFeatureExtractor

    return _load(AutoFeatureExtractor, "feature extractor", name, revision, trust_remote_code)


def _load(kind: Any, label: str, name: str, revision: str | None, trust_remote_code: bool) -> Any:
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if is_package_address(name) or Path(name).is_dir():
        name = str(resolve(name, weights=False, revision=revision))
    try:
        return kind.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"no {label} could be loaded from {name!r}: {reason}") from error


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    """Replace the chat template of a tokenizer; `save_pretrained` then writes the new template.

    Args:
        tokenizer: The tokenizer, which is changed.
        chat_template: The text of a Jinja template, or the path of a file that contains one.

    Raises:
        ConfigError: The file cannot be read, or the text is not a Jinja template.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    text = read_chat_template(chat_template)
    try:
        _compile_jinja_template(text)
    except Exception as error:  # jinja2 is no dependency of this package
        raise ConfigError(f"chat_template is not a Jinja template: {error}") from error
    tokenizer.chat_template = text


class Saveable(Protocol):
    """A tokenizer, or a processor."""

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write the files that `from_pretrained` reads."""
        ...


def with_length(tokenizer: Saveable, model: LanguageModel) -> Saveable:
    """Return a tokenizer whose `model_max_length` is at most the length of the model.

    A tokenizer without a length has the value 1e30, and truncation to that length does nothing. The
    tokenizer of a teacher may have more positions than the student. Truncation and padding of an
    earlier call are removed, because other programs apply those of tokenizer.json to every text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    longest = longest_sequence(model.config)
    if longest is None or getattr(tokenizer, "model_max_length", 0) <= longest:
        return tokenizer
    limited_tokenizer = copy.copy(tokenizer)
    limited_tokenizer.model_max_length = longest  # type: ignore[attr-defined]
    return limited_tokenizer
