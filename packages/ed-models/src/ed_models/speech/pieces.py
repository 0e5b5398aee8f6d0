"""Transcripts by models that read samples of sound: pieces of a recording, one after another.

Legend: n samples, t time steps, v labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from ed_models.speech.transcript import Segment
from ed_models.tasks.ctc import CTCModel, best_labels
from ed_models.tasks.seq2seq import Seq2SeqLM

#: Longest piece, and its overlap with each neighbour, in seconds.
PIECE_SECONDS, OVERLAP_SECONDS = 30.0, 5.0
#: A piece is padded to a multiple of this many seconds, so few programs are compiled.
PADDED_SECONDS = 5.0
#: Most tokens of a second of speech (Moonshine).
TOKENS_PER_SECOND = 6.5


class PieceReader:
    """Turns samples into the padded arrays of a model.

    Args:
        extract: the feature extractor of the checkpoint.
        rate: samples of a second.
    """

    def __init__(self, extract: Callable[..., Any], rate: int):
        self.extract, self.rate = extract, rate

    def arrays(self, samples: Float[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return `input_values` and `attention_mask` of one piece."""
        values = self.extract(samples, sampling_rate=self.rate, return_tensors="np")
        values = np.asarray(values["input_values"], np.float32)
        step = int(PADDED_SECONDS * self.rate)
        width = -(-values.shape[1] // step) * step
        mask = (np.arange(width) < values.shape[1]).astype(np.int32)[None]
        padded = np.pad(values, ((0, 0), (0, width - values.shape[1])))
        return {"input_values": padded, "attention_mask": mask}


class LabelDecoder:
    """Decodes recordings with a CTC model: overlapping pieces, the best label of each step.

    Args:
        model: the model.
        reader: prepares the pieces.
        decode: `labels -> text`; it gets the labels of the best path, merged and without blanks.
    """

    def __init__(
        self, model: CTCModel, reader: PieceReader, decode: Callable[[Sequence[int]], str]
    ):
        self.model, self.reader, self.text_of = model, reader, decode
        graphdef, self._state = nnx.split(model)

        @jax.jit
        def score(state: nnx.State, arrays: dict[str, jax.Array]) -> jax.Array:
            return nnx.merge(graphdef, state)(**arrays).logits[0]

        self._score = score

    def segments(
        self, samples: Float[np.ndarray, " n"], on_attempt: Callable[[], object] | None = None
    ) -> Iterator[Segment]:
        """Yield one segment, the whole recording."""
        rate, n = self.reader.rate, len(samples)
        piece, overlap = int(PIECE_SECONDS * rate), int(OVERLAP_SECONDS * rate)
        stride = self.samples_per_step(piece)
        parts, begin = [], 0
        while True:
            end = min(begin + piece, n)
            if on_attempt is not None:
                on_attempt()
            # A step belongs to the piece that has `overlap` samples on both sides of the step.
            first = overlap // stride if begin else 0
            last = (piece - overlap) // stride if end < n else None
            parts.append(self.scores(samples[begin:end])[first:last])
            if end == n:
                break
            begin += piece - 2 * overlap
        logits = np.concatenate(parts)
        labels = best_labels(logits, self.model.config.pad_token_id)
        moved = logits - logits.max(axis=-1, keepdims=True)
        best = -np.log(np.exp(moved).sum(axis=-1))
        text = self.text_of(labels)
        yield Segment(0, 0.0, n / rate, text, tuple(labels), avg_logprob=float(best.mean()))

    def samples_per_step(self, piece: int) -> int:
        """Return the number of samples between two time steps.

        Args:
            piece: samples of a piece. The first samples of a row fill the convolutions, so the
                steps of a second piece are counted.
        """
        one, two = np.asarray(self.model.output_lengths(jnp.array([piece, 2 * piece])))
        return round(piece / (two - one))

    def scores(self, samples: Float[np.ndarray, " n"]) -> Float[np.ndarray, "t v"]:
        """Return the scores of the labels of each time step of a piece."""
        arrays = self.reader.arrays(samples)
        logits = np.asarray(self._score(self._state, arrays))
        lengths = self.model.output_lengths(jnp.sum(arrays["attention_mask"], axis=1))
        return logits[: int(lengths[0])]


class SampleDecoder:
    """Decodes recordings with an encoder-decoder that reads samples: pieces that end in pauses.

    Args:
        model: the model.
        reader: prepares the pieces.
        decode: `tokens -> text`.
    """

    def __init__(
        self, model: Seq2SeqLM, reader: PieceReader, decode: Callable[[Sequence[int]], str]
    ):
        self.model, self.reader, self.text_of = model, reader, decode

    def segments(
        self,
        samples: Float[np.ndarray, " n"],
        temperature: float,
        seed: int,
        on_attempt: Callable[[], object] | None = None,
    ) -> Iterator[Segment]:
        """Yield a segment of each piece."""
        rate, begin, number = self.reader.rate, 0, 0
        draw = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        while begin < len(samples):
            end = begin + pause(samples[begin:], rate)
            seconds = (end - begin) / rate
            if on_attempt is not None:
                on_attempt()
            output = self.model.generate(
                inputs=self.reader.arrays(samples[begin:end]),
                max_new_tokens=max(int(seconds * TOKENS_PER_SECOND), 1),
                output_logprobs=True,
                seed=seed + number,
                **draw,
            )
            tokens = output.sequences[0, 1:].tolist()
            assert output.logprobs is not None, "requested above"
            yield Segment(
                id=number,
                start=begin / rate,
                end=end / rate,
                text=self.text_of(tokens),
                tokens=tuple(tokens),
                temperature=temperature,
                avg_logprob=float(np.mean(output.logprobs[0])),
                seek=int(begin / rate * 100),
            )
            begin, number = end, number + 1


def pause(samples: Float[np.ndarray, " n"], rate: int) -> int:
    """Return the end of a piece at the begin of `samples`: the quietest moment of its last fifth.

    A recording that fits into one piece is not cut.
    """
    most = int(PIECE_SECONDS * rate)
    if len(samples) <= most:
        return len(samples)
    width, first = rate // 50, most - most // 5
    tail = samples[first:most]
    blocks = tail[: len(tail) // width * width].reshape(-1, width)
    return first + int(np.argmin(np.square(blocks).sum(axis=1))) * width + width // 2
