"""The kinds of drafts, and the check of the model of a draft.

A kind is a file with a record `DraftKind` (`ed_esurge.core.proposals`) and an entry of
`DRAFT_KINDS`. A kind that computes nothing on the device, such as `ngram`, has a function that
creates its proposer; a kind with a model, such as `mtp`, gets the model and its memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from ed_infra.errors import ConfigError
from ed_models.generation.prompts import longest_sequence
from ed_models.protocol import LanguageModel

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.ngrams import NGRAM_KIND
from ed_esurge.core.proposals import DraftKind, Proposer
from ed_esurge.core.suffixes import SUFFIX_KIND
from ed_esurge.model import get_vocab_size, get_windows, is_recurrent
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
