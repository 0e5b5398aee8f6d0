"""What the engine needs of a model, and what it reads off one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import cast

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once
from ed_layers.cache.spec import LayerCacheSpec, grouped
from ed_models.adapter_slots import with_slots
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_esurge.config import EngineConfig
from ed_esurge.tokenizer import Tokenizer

logger = get_logger(__name__)


def platform_of(model: LanguageModel) -> str:
    """Where the model lies: cpu, gpu or tpu."""
    return model.config.mesh.devices.flat[0].platform


def served_model(model: LanguageModel) -> LanguageModel:
    """The model as the engine wants it: on a CPU unrolled, which steps up to six times faster."""
    if platform_of(model) == "cpu" and model.layout != "leaves":
        return model.to_layout("leaves")
    return model


def with_places(model: LanguageModel, config: EngineConfig) -> LanguageModel:
    """The model with places for adapters, where some can be loaded.

    Raises:
        ConfigError: see `ed_models.adapter_slots.with_slots`.
    """
    if not config.max_loras:
        return model
    module = cast(nnx.Module, model)
    placed = with_slots(module, config.max_loras, config.max_lora_rank, config.lora_targets)
    return cast(LanguageModel, placed).shard_model()


def windows_of(model: LanguageModel) -> dict[str, int | None]:
    """Group of layers with keys and values -> the window that they see; None = all tokens."""
    _, groups = grouped(model.cache_specs())
    first = {group: specs[0] for group, specs in groups.items()}
    return {name: spec.window for name, spec in first.items() if isinstance(spec, LayerCacheSpec)}


def is_recurrent(model: LanguageModel) -> bool:
    """Whether some layer keeps a state, which pages do not restore."""
    _, groups = grouped(model.cache_specs())
    return len(groups) > len(windows_of(model))


def model_name(model: LanguageModel) -> str:
    """What the model calls itself: the last part of where it came from, or its type."""
    origin = getattr(model.config, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    return PurePath(origin).name or str(model.config.model_type)


def eos_token_ids(
    model: LanguageModel, tokenizer: Tokenizer | None, extra: Sequence[int]
) -> frozenset[int]:
    """Every token that ends a text: the checkpoint's, the config's, the tokenizer's, the user's.

    Ids beyond the vocabulary are left out, because no step can sample them.
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
    vocab = cast(int, model.config.vocab_size)
    beyond = sorted(token for token in ends if not 0 <= token < vocab)
    if beyond:
        once(
            logger,
            f"end-of-sequence ids {beyond} are outside the vocabulary of {vocab}: they are ignored",
        )
    return frozenset(int(token) for token in ends.difference(beyond))


def drafting(
    config: EngineConfig, draft: LanguageModel | None, model: LanguageModel
) -> LanguageModel | None:
    """The model that proposes tokens, as the engine wants it; None where none does.

    Args:
        draft: the user's own; None = as `speculative_config` says.
        model: the served one: a draft model that is loaded gets its dtypes and its mesh.

    Raises:
        ConfigError: the method and the draft model do not fit together.
    """
    wanted = config.speculative_config
    asked = wanted is not None and wanted.method == "draft_model"
    if draft is not None and not asked:
        raise ConfigError(
            "a draft_model proposes nothing without the method: add "
            'speculative_config={"method": "draft_model"}'
        )
    if wanted is None or not asked:
        return None
    if draft is None:
        if wanted.model is None:
            raise ConfigError(
                "speculative_config of method draft_model needs a model: name its directory or hub "
                "id in `model`, or give eSurge a draft_model"
            )
        from ed_models.checkpoints import hub

        dtypes = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(cast(nnx.Module, model)))}
        floats = sorted({d.name for d in dtypes if jnp.issubdtype(d, jnp.floating)})
        dtype = floats[0] if len(floats) == 1 else "float32"
        loaded = hub.from_pretrained(
            wanted.model,
            dtype=dtype,
            param_dtype=dtype,
            sharding_axis_dims=model.config.sharding_axis_dims,
        )
        draft = cast(LanguageModel, loaded)
    return served_model(draft)
