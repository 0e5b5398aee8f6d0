"""The kinds of drafts, and the model of a draft.

A kind is a file with a record `DraftKind` (`ed_esurge.core.proposals`) and an entry of
`DRAFT_KINDS`. A kind that computes nothing on the device, such as `ngram`, has a function that
creates its proposer; a kind with a model, such as `mtp`, gets the model and its memory.
No other file compares the name of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_models.generation.prompts import longest_sequence
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_esurge.config import EngineConfig, SpeculativeConfig
from ed_esurge.core.ngrams import NGRAM_KIND
from ed_esurge.core.proposals import DraftKind, Proposer
from ed_esurge.core.suffixes import SUFFIX_KIND
from ed_esurge.model import get_vocab_size, get_windows, is_recurrent, served_model
from ed_esurge.runner.draft_model import DRAFT_GROUP, DRAFT_MODEL_KIND
from ed_esurge.runner.mtp_drafts import MTP_KIND

#: `speculative_config.method` -> kind.
DRAFT_KINDS: Mapping[str, DraftKind] = {
    "ngram": NGRAM_KIND,
    "suffix": SUFFIX_KIND,
    "draft_model": DRAFT_MODEL_KIND,
    "mtp": MTP_KIND,
}


def create_proposer(config: SpeculativeConfig) -> Proposer:
    """Return the proposer of a kind without a draft model."""
    create = DRAFT_KINDS[config.method].create
    assert create is not None, "a kind with a draft model has one"
    return create(config)


def resolve_draft(
    config: EngineConfig, draft: LanguageModel | None, model: LanguageModel
) -> LanguageModel | None:
    """Return the draft model for serving, or None without one.

    Args:
        config: the engine's options.
        draft: the user's draft model; None = the model of `speculative_config`.
        model: the served model. A loaded draft model receives its dtypes and mesh.

    Raises:
        ConfigError: the method is not compatible with the draft model.
    """
    speculative_config = config.speculative_config
    kind = None if speculative_config is None else DRAFT_KINDS[speculative_config.method]
    has_draft = kind is not None and kind.follow is not None
    if draft is not None and (kind is None or not has_draft or kind.derive is not None):
        raise ConfigError(
            "a draft_model has no effect without its method: add "
            'speculative_config={"method": "draft_model"}'
        )
    if speculative_config is None or kind is None or not has_draft:
        return None
    if kind.derive is not None:
        return cast(LanguageModel, kind.derive(model, speculative_config))
    if draft is None:
        if speculative_config.model is None:
            raise ConfigError(
                "speculative_config with method draft_model requires a model: set `model` to its "
                "directory or hub id, or pass draft_model to eSurge"
            )
        from ed_models.checkpoints import hub

        dtypes = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(cast(nnx.Module, model)))}
        floats = sorted({d.name for d in dtypes if jnp.issubdtype(d, jnp.floating)})
        dtype = floats[0] if len(floats) == 1 else "float32"
        loaded = hub.from_pretrained(
            speculative_config.model,
            dtype=dtype,
            param_dtype=dtype,
            sharding_axis_dims=model.config.sharding_axis_dims,
        )
        draft = cast(LanguageModel, loaded)
    return served_model(draft)


def check_draft(model: LanguageModel, draft: LanguageModel, longest: int) -> None:
    """Check that a draft model is compatible with the served model.

    Raises:
        ConfigError: the vocabularies differ, the draft model has windows or recurrent layers, or
            too few positions.
    """
    theirs, ours = get_vocab_size(draft), get_vocab_size(model)
    if theirs != ours:
        raise ConfigError(
            f"the draft model has a vocabulary of {theirs} tokens and the model one of {ours}: "
            "they must share their tokens"
        )
    if is_recurrent(draft) or get_windows(draft) != {DRAFT_GROUP: None}:
        raise ConfigError(
            "the draft model has layers with a window or a state: give one whose layers all see "
            "every token"
        )
    positions = longest_sequence(draft.config)
    if positions is not None and positions < longest:
        raise ConfigError(
            f"the draft model has {positions} positions and max_model_len is {longest}: lower it"
        )
