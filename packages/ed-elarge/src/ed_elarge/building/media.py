"""Models of images and speech: their processors, and the fields that depend on the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ed_data.config import Tokenization
from ed_data.languages import LANGUAGES
from ed_data.tokens.audio import TimeSteps
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError

from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.sections import TokenizerTraining

if TYPE_CHECKING:
    from ed_models.base.module import EasyDeLBaseModule
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

#: Model type of a vision tower -> its image processor in `transformers`; default: ViT's.
_PROCESSORS = {
    "clip_vision_model": "CLIPImageProcessorPil",
    "siglip_vision_model": "SiglipImageProcessorPil",
}
#: Model type -> its processor of images and texts.
_WITH_TEXT = {"clip": "CLIPProcessor", "siglip": "SiglipProcessor"}
#: Begins the transcripts of Whisper.
_START = "<|startoftranscript|>"


def train_processor(run: RunConfig, options: TokenizerTraining) -> ProcessorMixin:
    """Return the processor of a new model, with a tokenizer of the training transcripts.

    Later runs load the processor.

    Raises:
        ConfigError: The model is no new model.
        DataError: There is no text, or a source cannot be read.
    """
    from ed_data import texts
    from ed_data.tokens.speech_tokenizers import train_ctc, train_moonshine, train_whisper
    from transformers import AutoProcessor

    from ed_elarge.building.tokenizer_training import kept_or_made

    fields = (run.model.config if run.model is not None else None) or {}
    if not fields or run.mixture is None:
        raise ConfigError("tokenizer.train belongs to a new model: write model.config")
    mixture, kind = run.mixture, fields["model_type"]

    def make() -> ProcessorMixin:
        print("training the tokenizer of transcripts", flush=True)
        transcripts = texts(mixture, "train", schema=run.schema)
        if run.schema.task == "ctc":
            return train_ctc(transcripts, options.vocab_size)
        if kind == "whisper":
            return train_whisper(
                transcripts,
                options.vocab_size,
                min_frequency=options.min_frequency,
                mel_bins=fields.get("num_mel_bins", 80),
                positions=fields.get("max_source_positions", 1500),
            )
        return train_moonshine(transcripts, options.vocab_size, options.min_frequency)

    facts: dict[str, Any] = {"task": run.schema.task, "kind": kind}
    facts |= {name: fields.get(name) for name in ("num_mel_bins", "max_source_positions")}
    directory = run.directory / "tokenizer"
    load = AutoProcessor.from_pretrained
    return kept_or_made(
        options, mixture, directory, run.schema, make, load, facts, resumes=run.resumes
    )


def speech_config_fields(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the fields of a new model that depend on the tokenizer."""
    start = tokenizer.convert_tokens_to_ids(_START)
    if isinstance(start, int) and start != tokenizer.unk_token_id:
        # transformers' defaults are tokens of OpenAI's vocabulary.
        return {
            "decoder_start_token_id": start,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        }
    bos = tokenizer.bos_token_id
    return {} if bos is None else {"decoder_start_token_id": bos}


def set_generation(model: EasyDeLBaseModule, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokens of languages and tasks to generation_config.json, for a new Whisper."""
    fields = speech_config_fields(tokenizer)
    if "suppress_tokens" not in fields:
        return
    from transformers.models.whisper.tokenization_whisper import TASK_IDS

    vocab = tokenizer.get_vocab()

    def ids(names: Iterable[str]) -> dict[str, int]:
        return {name: vocab[f"<|{name}|>"] for name in names if f"<|{name}|>" in vocab}

    settings = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": fields["decoder_start_token_id"],
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": token for name, token in ids(LANGUAGES).items()},
        "task_to_id": ids(TASK_IDS),
        "no_timestamps_token_id": vocab["<|notimestamps|>"],
        "prev_sot_token_id": vocab["<|startofprev|>"],
        "max_length": model.config.max_target_positions,
        "return_timestamps": False,
        "begin_suppress_tokens": [tokenizer.eos_token_id],
    }
    model.generation_json = json.dumps(settings, indent=2, sort_keys=True) + "\n"


def set_language(model: EasyDeLBaseModule, tokenization: Tokenization) -> None:
    """Write the language and the task of the transcripts to generation_config.json.

    transformers then begins transcripts with these tokens by default, as after Hugging Face's
    recipe.
    """
    prefix_options = {"language": tokenization.language, "task": tokenization.task}
    named = {name: value for name, value in prefix_options.items() if value is not None}
    if named:
        stored = json.loads(model.generation_json) if model.generation_json else {}
        model.generation_json = json.dumps({**stored, **named}, indent=2, sort_keys=True) + "\n"


def time_steps(config: EasyDeLBaseConfig) -> TimeSteps:
    """Return the convolutions of a CTC model."""
    return TimeSteps(tuple(config.conv_kernel), tuple(config.conv_stride))


def new_processor(
    config: EasyDeLBaseConfig, tokenizer: PreTrainedTokenizerBase | None
) -> ProcessorMixin:
    """Return the processor of a new model.

    The image processor resizes images to `image_size`, and normalizes them with the mean and the
    deviation of its class.

    Args:
        config: The configuration of the model.
        tokenizer: The tokenizer; None for a model without text, whose image processor is returned.

    Raises:
        ConfigError: New models of the model type have no processor.
    """
    import transformers

    vision = getattr(config, "vision_config", config)
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    name = _PROCESSORS.get(vision.model_type, "ViTImageProcessorPil")
    sizes: dict[str, Any] = {"size": {"height": height, "width": width}}
    if name == "CLIPImageProcessorPil":
        sizes["do_center_crop"] = False
    images = getattr(transformers, name)(**sizes)
    if tokenizer is None:
        return images
    if config.model_type not in _WITH_TEXT:
        model_types = ", ".join(_WITH_TEXT)
        raise ConfigError(
            f"a new model of type {config.model_type!r} has no processor of images and texts, only "
            f"{model_types} have: set model.tokenizer to a directory with a processor"
        )
    kind = getattr(transformers, _WITH_TEXT[config.model_type])
    return kind(image_processor=images, tokenizer=tokenizer)
