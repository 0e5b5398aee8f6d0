"""Random masks of tokens and words, drawn on the host (BERT, arXiv:1810.04805).

The mask of a row depends on a seed, a step and the tokens of the row. A resumed run, another mesh
and another number of processes therefore use the same masks. `NumberedFeed` adds the step to a
batch.

Legend: b rows, s positions, k selected positions of a row at most, v vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from ed_infra.errors import ConfigError

from ed_trainers.batches import Dataset, Feed, HostBatch, Share
from ed_trainers.contract import MethodRun

#: Prefixes that mark continued words (WordPiece), or the first token of a word (the others).
_CONTINUES, _BEGINS = "##", (("Ġ", "Ċ", "ĉ", "č"), ("▁",))
#: Assumed length of a word in tokens, and number of standard deviations above the mean count.
_WORD_TOKENS, _DEVIATIONS = 4, 6


class MaskTokenizer(Protocol):
    """The attributes of a tokenizer of transformers that masking reads."""

    mask_token_id: int | None
    all_special_ids: list[int]

    def __len__(self) -> int:
        """Return the number of ids."""
        ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Return the texts of tokens."""
        ...


@dataclass(frozen=True)
class Vocabulary:
    """The mask token, the special tokens, and the first tokens of words.

    Attributes:
        mask: id of the mask token.
        special: bool [v], True for special tokens, which are never masked.
        begins: bool [v], True for tokens that begin a word; None selects single tokens.
    """

    mask: int
    special: np.ndarray
    begins: np.ndarray | None = None

    @classmethod
    def of(cls, tokenizer: MaskTokenizer, *, whole_words: bool) -> Vocabulary:
        """Return the vocabulary of a tokenizer.

        Raises:
            ConfigError: the tokenizer has no mask token, or the words of its tokens are unknown.
        """
        mask = tokenizer.mask_token_id
        if mask is None:
            raise ConfigError(
                "the tokenizer has no mask token, which masked language modeling needs: use the "
                "tokenizer of a masked language model, or set its mask_token"
            )
        special = np.zeros(len(tokenizer), bool)
        special[tokenizer.all_special_ids] = True
        begins = word_begins(tokenizer) | special if whole_words else None
        return cls(mask, special, begins)

    def words(self, ids: np.ndarray, segment_ids: np.ndarray) -> np.ndarray | None:
        """Return the number of the word of each token within its row, from 0, [b, s]."""
        if self.begins is None:
            return None
        first = np.diff(segment_ids, axis=1, prepend=0) != 0
        after_special = np.zeros_like(first)
        after_special[:, 1:] = self.special[ids[:, :-1]]
        return np.maximum(np.cumsum(self.begins[ids] | first | after_special, axis=1) - 1, 0)


class MaskedRows(NamedTuple):
    """Masked rows.

    Attributes:
        input_ids: int32 [b, s], with masked and random tokens.
        positions: int32 [b, k], the selected positions of each row, in order.
        targets: int32 [b, k], the original tokens.
        weights: float32 [b, k], the weight of each target; 0 for unused slots.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def word_begins(tokenizer: MaskTokenizer) -> np.ndarray:
    """Return whether each token begins a word, bool [v].

    The prefix that most tokens of the vocabulary have determines the kind of the tokenizer.

    Raises:
        ConfigError: no token has a known prefix.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    continues = np.array([token.startswith(_CONTINUES) for token in tokens])
    kinds = [~continues]
    counts = [int(continues.sum())]
    for prefixes in _BEGINS:
        begins = np.array([token.startswith(prefixes) for token in tokens])
        kinds.append(begins)
        counts.append(int(begins.sum()))
    if not max(counts):
        raise ConfigError(
            "whole_word_mask cannot find words: no token of the tokenizer begins with '##', 'Ġ' or "
            "'▁'; set whole_word_mask: false"
        )
    return kinds[int(np.argmax(counts))]


def most_selected(positions: int, probability: float, *, whole_words: bool) -> int:
    """Return k, the largest number of selected tokens of a row.

    k is the mean plus six standard deviations, so a row almost never has more selected tokens.
    A fixed number keeps the shapes of all steps equal, like BERT's `max_predictions_per_seq`.
    """
    together = _WORD_TOKENS if whole_words else 1
    deviation = math.sqrt(positions * together * probability * (1 - probability))
    return min(positions, math.ceil(positions * probability + _DEVIATIONS * deviation))


def masked_rows(
    input_ids: np.ndarray,
    segment_ids: np.ndarray,
    weights: np.ndarray,
    vocabulary: Vocabulary,
    *,
    probabilities: tuple[float, float, float],
    seed: tuple[int, ...],
) -> MaskedRows:
    """Select tokens, and replace most of them.

    Args:
        input_ids: int32 [b, s].
        segment_ids: int32 [b, s]; 0 = padding, which is never selected.
        weights: float32 [b, s]; a token with weight 0 is never selected.
        vocabulary: the mask token, the special tokens, and the first tokens of words.
        probabilities: of selecting a token or word, of replacing a selected token by the mask
            token, and of replacing it by a random token.
        seed: the seed of the run, and the step.
    """
    select, mask, replace = probabilities
    s, whole_words = input_ids.shape[1], vocabulary.begins is not None
    most = most_selected(s, select, whole_words=whole_words)
    words = vocabulary.words(input_ids, segment_ids)
    allowed = (weights > 0) & (segment_ids > 0) & ~vocabulary.special[input_ids]
    masked_ids = input_ids.copy()
    shape = (len(input_ids), most)
    positions, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    target_weights = np.zeros(shape, np.float32)
    for row, ids in enumerate(input_ids):
        random = row_generator(seed, ids, segment_ids[row])
        draws, kinds = random.random((2, s))
        random_ids = random.integers(len(vocabulary.special), size=s)
        selection = (draws if words is None else draws[words[row]]) < select
        at = np.flatnonzero(selection & allowed[row])
        if len(at) > most:
            # A word is selected as a whole: the cut removes the word that does not fit.
            cut = at[:most] if words is None else at[words[row][at] < words[row][at[most]]]
            at = cut
        masked_ids[row, at[kinds[at] < mask]] = vocabulary.mask
        swapped = at[(kinds[at] >= mask) & (kinds[at] < mask + replace)]
        masked_ids[row, swapped] = random_ids[swapped]
        positions[row, : len(at)], targets[row, : len(at)] = at, ids[at]
        target_weights[row, : len(at)] = weights[row, at]
    return MaskedRows(masked_ids, positions, targets, target_weights)


def row_generator(
    seed: tuple[int, ...], ids: np.ndarray, segments: np.ndarray
) -> np.random.Generator:
    """Return the generator of a row. Padding does not change its draws.

    Args:
        seed: the seed of the run, and the step.
        ids: tokens of the row [s].
        segments: segments of the row [s].
    """
    token_mask = segments > 0
    content = np.stack([ids[token_mask], segments[token_mask]]).astype("<i4").tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return np.random.default_rng((*seed, int.from_bytes(digest, "little")))


#: Name of the number of a training batch: the step, from 1.
STEP_KEY = "mask_step"
#: The number of held-out batches, whose random numbers are always the same.
_HELD_OUT = 0


class NumberedFeed(Feed):
    """The training batches with the number of their step."""

    def batch(self, step: int) -> HostBatch:
        batch = super().batch(step)
        return {**batch, STEP_KEY: np.asarray(step + 1)}


def feed(run: MethodRun[Any], dataset: Dataset) -> Feed:
    """Return the training batches of a dataset, by step."""
    return NumberedFeed(dataset, Share.of(dataset, run.placement, run.rows))


def get_batch_number(batch: HostBatch) -> int:
    """Return the number of a batch: its step, from 1, or 0 for held-out data."""
    return int(batch.get(STEP_KEY, _HELD_OUT))
