"""The prompts of `generate`: what callers pass, checked, and as programs take it.

Legend: b rows, s prompt length, w bucket of prompt lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from jaxtyping import Bool, Int

from ed_models.body.context import longest_sequence

_SMALLEST_BUCKET = 16
TokenRows = jax.Array | np.ndarray | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Prompts:
    """Checked prompts.

    Attributes:
        ids: int32 [b, s], as they came.
        kept: which entries are tokens, [b, s].
        lengths: tokens of each row, int32 [b].
    """

    ids: Int[np.ndarray, "b s"]
    kept: Bool[np.ndarray, "b s"]
    lengths: Int[np.ndarray, " b"]

    @classmethod
    def read(
        cls,
        ids: Int[np.ndarray, "b s"],
        attention_mask: TokenRows | None,
        padding: int | None,
        config: EasyDeLBaseConfig,
    ) -> Prompts:
        """Check prompts.

        Args:
            ids: from `token_ids`.
            attention_mask: [b, s], 1 for a token, 0 for padding.
            padding: the token that is padding at the start of a row, if there is no mask.
            config: of the model that gets the prompts.

        Raises:
            ConfigError: see `generate`.
        """
        kept = _kept(ids, attention_mask, padding)
        lengths = kept.sum(axis=1).astype(np.int32)
        if not lengths.all():
            raise ConfigError(f"row {int(np.argmin(lengths))} of input_ids is nothing but padding")
        return cls(_in_vocabulary(ids, kept, config), kept, lengths)

    def aligned(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and validity [b, w], each row against the right edge of a bucket."""
        return right_aligned(self.ids, self.kept, bucket(int(self.lengths.max())))

    def check_room(self, config: EasyDeLBaseConfig, new: int) -> None:
        """Whether a model has positions for `new` tokens more.

        Raises:
            ConfigError: it has not.
        """
        limit, prompt = longest_sequence(config.get_text_config()), int(self.lengths.max())
        if limit is None or prompt + new <= limit:
            return
        raise ConfigError(
            f"{prompt} prompt tokens and max_new_tokens={new} need {prompt + new} positions, but "
            f"the model was made for max_position_embeddings={limit}; ask for at most "
            f"{limit - prompt} new tokens"
            if prompt < limit
            else f"the prompt has {prompt} tokens, which leaves no room in the model's "
            f"max_position_embeddings={limit}; shorten it"
        )


def bucket(n: int) -> int:
    """Round up to a power of two, at least 16: so many programs are compiled, and no more."""
    return max(_SMALLEST_BUCKET, 1 << (n - 1).bit_length())


def right_aligned(ids: np.ndarray, kept: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Move each row's tokens to the right edge of [b, width]; returns tokens and validity."""
    tokens = np.zeros((len(ids), width), np.int32)
    valid = np.zeros((len(ids), width), np.int32)
    for row, (values, keep) in enumerate(zip(ids, kept, strict=True)):
        packed = values[keep]
        tokens[row, width - len(packed) :] = packed
        valid[row, width - len(packed) :] = 1
    return tokens, valid


def token_ids(input_ids: TokenRows) -> Int[np.ndarray, "b s"]:
    """The prompts as an array of integers.

    Raises:
        ConfigError: they are something else.
    """
    try:
        ids = np.asarray(input_ids)
    except ValueError:
        raise ConfigError(
            "the rows of input_ids have different lengths; pad them on the left to one length, "
            "and give attention_mask"
        ) from None
    if ids.ndim != 2 or 0 in ids.shape:
        raise ConfigError(
            f"input_ids has shape {list(ids.shape)}; it must be [rows, tokens], at least one each"
        )
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"input_ids has dtype {ids.dtype}; token ids are whole numbers")
    return ids


def _in_vocabulary(
    ids: Int[np.ndarray, "b s"], kept: Bool[np.ndarray, "b s"], config: EasyDeLBaseConfig
) -> Int[np.ndarray, "b s"]:
    """The prompts as int32, after a check of all tokens that are no padding."""
    size = getattr(config.get_text_config(), "vocab_size", None) or 2**31
    for row, at in np.argwhere(kept & ((ids < 0) | (ids >= size))):
        raise ConfigError(
            f"token {ids[row, at]} (row {row}, position {at} of input_ids) is not in the model's "
            f"vocabulary of {size} tokens; was the tokenizer made for another model?"
        )
    return ids.astype(np.int32)


def _kept(
    ids: Int[np.ndarray, "b s"], attention_mask: TokenRows | None, padding: int | None
) -> Bool[np.ndarray, "b s"]:
    """Which entries of the prompts are tokens."""
    if attention_mask is not None:
        mask = np.asarray(attention_mask)
        if mask.shape != ids.shape:
            raise ConfigError(
                f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}; "
                "they must be equal"
            )
        return mask != 0
    if padding is None:
        return np.ones(ids.shape, bool)
    return np.logical_or.accumulate(ids != padding, axis=1)
