"""Properties of models that the engine uses, and conversions of models for the engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, cast

from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_infra.package_files import get_source_name
from ed_layers import native
from ed_layers.cache.spec import LayerCacheSpec, group_layers
from ed_models.adapters.slots import with_slots
from ed_models.checkpoints.embedding_settings import EmbeddingSettings
from ed_models.generation.prompts import is_encoder_decoder
from ed_models.modalities.items import EncoderItems, ItemArrays, get_modality, used_items
from ed_models.protocol import LanguageModel
from ed_models.tasks.classification import SequenceClassifier
from ed_models.tasks.embedding import Embedder
from flax import nnx
from jax.sharding import Mesh
from pydantic import ValidationError

from ed_esurge.config import EngineConfig, SamplingDefaults
from ed_esurge.core.commands import DecoderStart, EncoderInput, TokenRules
from ed_esurge.outputs import LabelSet
from ed_esurge.tokenizer import Tokenizer

logger = get_logger(__name__)


def get_platform(model: LanguageModel) -> str:
    """Return the platform of the model's devices: cpu, gpu or tpu."""
    return model.config.mesh.devices.flat[0].platform


def get_processes(mesh: Mesh) -> list[int]:
    """Return the sorted indices of the processes that have devices of a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})


def over_processes(model: LanguageModel) -> bool:
    """Return whether a model is sharded over devices of several processes."""
    return len(get_processes(model.config.mesh)) > 1


def choose_layout(platform: str) -> dict[str, bool]:
    """Return the fields of a configuration whose weights only an engine on a platform reads.

    In a scan over stacked layers, a decode step on a CPU or a GPU copies the weights of each layer
    before it multiplies them: the compiled step moves three times the bytes
    (`tools/bench/gpu_programs.py`).
    """
    return {"scan_layers": False} if platform in ("cpu", "gpu") else {}


def served_model(model: LanguageModel) -> LanguageModel:
    """Return the model for serving: on a CPU with unrolled layers, up to six times faster per
    step."""
    if get_platform(model) == "cpu" and model.layout != "leaves":
        return model.to_layout("leaves")
    return model


def with_places(model: LanguageModel, config: EngineConfig) -> LanguageModel:
    """Return the model with adapter slots, if `max_loras` is positive.

    Raises:
        ConfigError: see `ed_models.adapters.slots.with_slots`.
    """
    if not config.max_loras:
        return model
    module = cast(nnx.Module, model)
    placed = with_slots(module, config.max_loras, config.max_lora_rank, config.lora_targets)
    return cast(LanguageModel, placed).shard_model()


def get_windows(model: LanguageModel) -> dict[str, int | None]:
    """Return group of self-attention layers -> attention window; None = unlimited."""
    _, groups = group_layers(model.cache_specs())
    first = {group: specs[0] for group, specs in groups.items()}
    return {
        name: spec.window
        for name, spec in first.items()
        if isinstance(spec, LayerCacheSpec) and name != "cross"
    }


def is_recurrent(model: LanguageModel) -> bool:
    """Return whether a layer is recurrent. Pages do not restore recurrent states."""
    _, groups = group_layers(model.cache_specs())
    return any(not isinstance(specs[0], LayerCacheSpec) for specs in groups.values())


#: Projections that only attention reads, which ignores padding.
_FOR_ATTENTION = ("q_proj", "k_proj", "v_proj")


def omits_padding(model: LanguageModel) -> bool:
    """Return whether padding tokens need almost no time on a CPU.

    The hidden states of padding are zeros, and the native library does not multiply zeros at the
    end of a batch. This requires matrices of numbers, and layers whose output for zeros is zero.
    """
    with native.chosen_by(model.config):
        if not native.products.in_use() or is_recurrent(model):
            return False
    for path, value in nnx.to_flat_state(nnx.state(cast(nnx.Module, model))):
        biased = path[-1] == "bias" and path[-2] not in _FOR_ATTENTION
        if biased or "experts" in path or value.get_value().dtype not in native.products.NUMBERS:
            return False
    return True


def classifies(model: LanguageModel) -> bool:
    """Return whether the model returns scores of labels."""
    return isinstance(model, SequenceClassifier)


def get_task(model: LanguageModel) -> TaskType:
    """Return the task of the model."""
    if isinstance(model, SequenceClassifier):
        return TaskType.SEQUENCE_CLASSIFICATION
    if isinstance(model, Embedder):
        return TaskType.EMBEDDING
    if is_encoder_decoder(model):
        return TaskType.SEQUENCE_TO_SEQUENCE
    modality = get_modality(model)
    if modality is None:
        return TaskType.CAUSAL_LM
    return TaskType.IMAGE_TEXT_TO_TEXT if modality.noun == "images" else TaskType.ANY_TO_ANY


def get_labels(model: LanguageModel) -> LabelSet | None:
    """Return the labels of a classifier; None for other models."""
    if not isinstance(model, SequenceClassifier):
        return None
    config: Any = model.config
    names = config.id2label or {}
    ordered = tuple(names.get(index) for index in range(config.num_labels))
    return LabelSet(ordered, config.problem_type, _score_activation(config))


#: Class of torch -> activation of the score of a pair.
_SCORE_ACTIVATIONS: dict[str, Literal["identity", "sigmoid"]] = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
}


def _score_activation(config: object) -> Literal["identity", "sigmoid"]:
    """Return the activation that a cross-encoder of sentence-transformers stores in its config."""
    stored = getattr(config, "sentence_transformers", None) or {}
    # Versions before 4.0 have another field.
    older = getattr(config, "sbert_ce_default_activation_function", None)
    named = stored.get("activation_fn", older)
    if named is None:
        return "sigmoid"
    name = str(named).rpartition(".")[2]
    if name not in _SCORE_ACTIVATIONS:
        raise ConfigError(
            f"the activation of the cross-encoder is {named!r}; supported activations are "
            f"{', '.join(_SCORE_ACTIVATIONS)}: change sentence_transformers.activation_fn in "
            "config.json"
        )
    return _SCORE_ACTIVATIONS[name]


def get_embedding_settings(model: LanguageModel) -> EmbeddingSettings | None:
    """Return the prompts and limits of an embedding model; None for other models."""
    return model.embedding_settings if isinstance(model, Embedder) else None


def is_encoder(model: LanguageModel) -> bool:
    """Return whether the model returns one vector per prompt, and generates no tokens."""
    return isinstance(model, Embedder | SequenceClassifier)


def reads_ahead(model: LanguageModel) -> Literal["image", "prompt"] | None:
    """Return which tokens attend to later ones: those of an image, those of a prompt, or none.

    A step computes such tokens together.
    """
    return getattr(model, "reads_ahead", None)


def get_decoder_start(model: LanguageModel) -> DecoderStart | None:
    """Return the first tokens and the rules of an encoder-decoder; None for other models.

    The values are those of generation_config.json, or of config.json if that file lacks them.

    Raises:
        ConfigError: the configuration lacks the first token, or a value is invalid.
    """
    if not is_encoder_decoder(model):
        return None
    stored = json.loads(getattr(model, "generation_json", None) or "{}")

    def value(name: str) -> Any:
        return stored[name] if name in stored else getattr(model.config, name, None)

    def tokens(name: str) -> tuple[int, ...]:
        token_ids = value(name)
        token_ids = (
            ()
            if token_ids is None
            else token_ids
            if isinstance(token_ids, list | tuple)
            else (token_ids,)
        )
        vocab = get_vocab_size(model)
        if not all(isinstance(token, int) and 0 <= token < vocab for token in token_ids):
            raise ConfigError(
                f"{name}={list(token_ids)!r:.100} of the checkpoint must be token ids below {vocab}"
            )
        return tuple(token_ids)

    start, bos, eos = (
        tokens(name)
        for name in ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")
    )
    start = start or tokens("bos_token_id")
    if not start:
        raise ConfigError(
            "the configuration of the encoder-decoder has neither decoder_start_token_id nor "
            "bos_token_id"
        )
    decoder_vocab_size = getattr(model.config, "decoder_vocab_size", None)
    if decoder_vocab_size not in (None, get_vocab_size(model)):
        raise ConfigError(
            f"the decoder has its own vocabulary of {decoder_vocab_size} tokens "
            "(decoder_vocab_size), and the "
            "engine serves one vocabulary: use model.generate"
        )
    rules = TokenRules(
        tokens("suppress_tokens"), tokens("begin_suppress_tokens"), eos[0] if eos else None
    )
    words = tuple(tuple(word) for word in value("bad_words_ids") or ())
    unused = [name for name in _UNUSED if name in stored and stored[name] != _UNUSED[name]]
    if unused:
        option_text = ", ".join(f"{name}={stored[name]}" for name in unused)
        once(logger, f"the engine ignores options of generation_config.json: {option_text}")
    return DecoderStart(
        start[0],
        bos[0] if bos else None,
        rules if rules != TokenRules() else None,
        tuple(word for word in words if len(word)),
    )


#: Options of generation_config.json without an effect in the engine, and their defaults.
_UNUSED: Mapping[str, Any] = {
    "num_beams": 1,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
}


def get_sampling_defaults(model: LanguageModel) -> SamplingDefaults:
    """Return the sampling options of generation_config.json. Invalid values are logged and
    omitted."""
    stored = json.loads(getattr(model, "generation_json", None) or "{}")
    values: dict[str, object] = {}
    for name in SamplingDefaults.model_fields.keys() & stored.keys():
        try:
            SamplingDefaults.model_validate({name: stored[name]})
        except ValidationError:
            text = f"{name}={stored[name]!r:.100}"
            once(logger, f"the engine ignores an invalid option of generation_config.json: {text}")
        else:
            values[name] = stored[name]
    return SamplingDefaults.model_validate(values)


def get_vocab_size(model: LanguageModel) -> int:
    """Return the vocabulary size of the model's text."""
    text = model.config.get_text_config()
    return int(text.vocab_size)


def model_name(model: LanguageModel) -> str:
    """Return the name of a model: that of its source, or its model type."""
    origin = getattr(model.config, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    return get_source_name(str(origin)) or str(model.config.model_type)


def eos_token_ids(
    model: LanguageModel, tokenizer: Tokenizer | None, extra: Sequence[int]
) -> frozenset[int]:
    """Return the end-of-sequence tokens of checkpoint, config, tokenizer and user.

    Ids outside the vocabulary are omitted, because no step can sample them.
    """
    stored = json.loads(getattr(model, "generation_json", None) or "{}")
    sources = (
        stored.get("eos_token_id"),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    ends = set(extra)
    for source in sources:
        if source is not None:
            ends.update(source if isinstance(source, list | tuple) else [source])
    vocab = get_vocab_size(model)
    invalid_ids = sorted(token for token in ends if not 0 <= token < vocab)
    if invalid_ids:
        once(
            logger,
            f"end-of-sequence ids {invalid_ids} are outside the vocabulary of {vocab}: they are "
            "ignored",
        )
    return frozenset(int(token) for token in ends.difference(invalid_ids))


def placed_items(
    items: EncoderItems, row: ItemArrays, ids: Sequence[int], tokens: Collection[int]
) -> tuple[EncoderInput, ...]:
    """Return the items of a prompt from the arrays of a row of a batch.

    Args:
        items: the items of the model.
        row: arrays of the images of the prompt, padded with zeros.
        ids: tokens of the prompt.
        tokens: the placeholder tokens of a feature.

    Raises:
        ConfigError: the numbers of placeholder tokens and of features differ.
    """
    places = [place for place, token_id in enumerate(ids) if token_id in tokens]
    prompt_items: list[EncoderInput] = []
    first = 0
    for arrays, length in used_items(items, row, len(places), tokens):
        item = EncoderInput.at(arrays, places[first : first + length])
        if item.gaps != items.gaps(arrays):
            raise ConfigError(
                f"item {len(prompt_items)} of the prompt has other tokens between its {length} "
                f"placeholder tokens {sorted(tokens)}: use the processor of the checkpoint"
            )
        prompt_items.append(item)
        first += length
    return tuple(prompt_items)
