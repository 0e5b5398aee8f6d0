"""Span corruption of T5, drawn on the host (Raffel et al., arXiv:1910.10683).

The algorithm is that of T5's `random_spans_noise_mask`: the numbers of noise tokens and of spans
follow from the length, and both kinds of tokens are divided into spans at random.

Legend: b rows, s positions of the encoder, t positions of the decoder, n tokens of a document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from ed_infra.errors import ConfigError

from ed_trainers.losses.masking import row_generator

#: Name of the sentinels in the vocabularies of T5.
SENTINEL = "<extra_id_{}>"
_MULTIPLE = 8


class SentinelTokenizer(Protocol):
    """The attributes of a tokenizer of transformers that span corruption reads."""

    eos_token_id: int | None
    unk_token_id: int | None

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of the tokens."""
        ...


@dataclass(frozen=True)
class Sentinels:
    """The tokens that replace spans, and the token that ends a text.

    Attributes:
        ids: sentinels in the order of the spans.
        eos: ends each document of encoder and decoder.
    """

    ids: np.ndarray
    eos: int

    @classmethod
    def of(cls, tokenizer: SentinelTokenizer) -> Sentinels:
        """Return the sentinels of a tokenizer.

        Raises:
            ConfigError: the tokenizer has no sentinels, or no end-of-text token.
        """
        vocabulary, ids = tokenizer.get_vocab(), []
        while (token := vocabulary.get(SENTINEL.format(len(ids)))) is not None:
            ids.append(token)
        if not ids or tokenizer.eos_token_id is None:
            missing = "sentinels <extra_id_0>, <extra_id_1>, …" if not ids else "end-of-text token"
            raise ConfigError(
                f"the tokenizer has no {missing}, which span corruption needs: use the tokenizer "
                "of a T5 model, or add these special tokens"
            )
        return cls(np.array(ids, np.int32), int(tokenizer.eos_token_id))


def noise_counts(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Return the number of noise tokens and of spans of a document; (0, 0) below two tokens.

    Args:
        length: number of tokens n.
        density: share of noise tokens.
        mean_span: mean number of tokens of a span.
    """
    if length < 2:
        return 0, 0
    noise = min(max(round(length * density), 1), length - 1)
    spans = max(round(noise / mean_span), 1)
    return noise, min(spans, length - noise)


def target_length(length: int, density: float, mean_span: float) -> int:
    """Return the number of decoder tokens of a document: sentinels, noise, and the end."""
    noise, spans = noise_counts(length, density, mean_span)
    return noise + spans + 1


def target_width(positions: int, density: float, mean_span: float) -> int:
    """Return the default number of decoder positions of rows with a number of positions."""
    needed = 2 * target_length(positions, density, mean_span)
    return min(-(-needed // _MULTIPLE) * _MULTIPLE, max(positions, _MULTIPLE))


def noise_mask(length: int, noise: int, spans: int, random: np.random.Generator) -> np.ndarray:
    """Return whether each token is noise, bool [n]; the first token is none, the last one is."""

    def lengths(items: int) -> np.ndarray:
        """Divide items into spans of at least one item."""
        first = np.zeros(items, bool)
        first[1:] = random.permutation(np.arange(items - 1) < spans - 1)
        return np.bincount(np.cumsum(first), minlength=spans)

    noise_spans = lengths(noise)
    other_spans = lengths(length - noise)
    interleaved = np.stack([other_spans, noise_spans], axis=1).reshape(-1)
    return np.repeat(np.arange(2 * spans) % 2 == 1, interleaved)


def replace_spans(ids: np.ndarray, noise: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """Return the tokens, with the sentinel of its number in place of each span of noise."""
    starts = noise & ~np.concatenate([[False], noise[:-1]])
    output_ids = ids.copy()
    output_ids[starts] = sentinels[: int(starts.sum())]
    return output_ids[~noise | starts]


class CorruptedRows(NamedTuple):
    """Rows for an encoder-decoder.

    Attributes:
        input_ids, segment_ids, position_ids: int32 [b, s], the texts with sentinels.
        labels: int32 [b, t], the spans after their sentinels; -100 is padding.
        decoder_segment_ids: int32 [b, t], equal to the number of the text.
    """

    input_ids: np.ndarray
    segment_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray
    decoder_segment_ids: np.ndarray


def corrupted_rows(
    input_ids: np.ndarray,
    segment_ids: np.ndarray,
    sentinels: Sentinels,
    *,
    density: float,
    mean_span: float,
    width: int,
    pad: int,
    seed: tuple[int, ...],
) -> CorruptedRows:
    """Replace spans of each document by sentinels.

    The end-of-text token of a document is no noise. A document without that token, whose rest is in
    another row, has none in the encoder either. The targets of each document end with it.

    Args:
        input_ids: int32 [b, s].
        segment_ids: int32 [b, s]; 0 = padding.
        sentinels: the tokens that replace spans.
        density: share of noise tokens.
        mean_span: mean number of tokens of a span.
        width: t; a document whose targets do not fit stays unchanged and has no targets.
        pad: id of padding.
        seed: the seed of the run, and the step.

    Raises:
        ConfigError: a document has more spans than the tokenizer has sentinels.
    """
    b, s = input_ids.shape
    rows = CorruptedRows(
        np.full((b, s), pad, np.int32),
        np.zeros((b, s), np.int32),
        np.zeros((b, s), np.int32),
        np.full((b, width), -100, np.int32),
        np.zeros((b, width), np.int32),
    )
    for row in range(b):
        read = wrote = 0
        for segment in range(1, int(segment_ids[row].max(initial=0)) + 1):
            document_mask = segment_ids[row] == segment
            document_ids = input_ids[row][document_mask]
            if not len(document_ids):
                continue
            # The draws of a document do not depend on the other documents of its row.
            random = row_generator(seed, document_ids, np.ones_like(document_ids))
            ended = document_ids[-1] == sentinels.eos
            ids = document_ids[:-1] if ended else document_ids
            source, target = _corrupt_document(ids, sentinels, density, mean_span, random)
            if not len(target) or wrote + len(target) > width:
                source, target = ids, target[:0]
            source = np.append(source, sentinels.eos) if ended else source
            at = slice(read, read + len(source))
            rows.input_ids[row, at], rows.segment_ids[row, at] = source, segment
            rows.position_ids[row, at] = np.arange(len(source))
            to = slice(wrote, wrote + len(target))
            rows.labels[row, to], rows.decoder_segment_ids[row, to] = target, segment
            read, wrote = at.stop, to.stop
    return rows


def _corrupt_document(
    ids: np.ndarray,
    sentinels: Sentinels,
    density: float,
    mean_span: float,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of encoder and decoder; no tokens of the decoder without noise."""
    noise, spans = noise_counts(len(ids), density, mean_span)
    if not noise:
        return ids, ids[:0]
    if spans > len(sentinels.ids):
        raise ConfigError(
            f"a document of {len(ids)} tokens has {spans} spans, and the tokenizer has "
            f"{len(sentinels.ids)} sentinels: shorten the rows (mixture.pack_seq_length), increase "
            "mean_noise_span_length, or use a tokenizer with more sentinels"
        )
    mask = noise_mask(len(ids), noise, spans, random)
    target = np.append(replace_spans(ids, ~mask, sentinels.ids), sentinels.eos)
    return replace_spans(ids, mask, sentinels.ids), target
