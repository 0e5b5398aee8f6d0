"""Transcripts by Whisper: windows of 30 seconds, times, and repeated attempts.

The steps and their order are those of `WhisperForConditionalGeneration.generate` of `transformers`,
for one recording: greedy tokens are equal.

Legend: m mel bins, f frames of 10 ms, t encoder positions, d hidden.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, did_you_mean
from flax import nnx
from jaxtyping import Float

from ed_models.generation.options import special_token
from ed_models.generation.prompts import bucket, right_aligned
from ed_models.generation.timestamps import TimestampRules
from ed_models.speech.alignment import TokenAligner
from ed_models.speech.transcript import Segment

if TYPE_CHECKING:
    from ed_models.base.module import EasyDeLBaseModule

#: Seconds of a frame of a spectrogram, and of one step of the tokens of times.
FRAME, STEP = 0.01, 0.02
_STRIDE = 2  # frames of an encoder position


@dataclass(frozen=True)
class Thresholds:
    """When an attempt is repeated with the next temperature; None disables a threshold.

    Attributes:
        compression_ratio: larger ratios are repetitions of the same words.
        logprob: lower mean log-probabilities are guesses.
        no_speech: a window is silent if its probability of no speech is larger, and its mean
            log-probability is lower than `logprob`.
    """

    compression_ratio: float | None = 1.35
    logprob: float | None = -1.0
    no_speech: float | None = 0.6


@dataclass(frozen=True)
class WhisperTokens:
    """The special tokens of a checkpoint, from its generation_config.json.

    Attributes:
        start, end: first and last token of a transcript.
        no_timestamps: asks for text without times; the tokens after it name times.
        languages: code of a language, such as "en" -> its token; empty for English-only models.
        tasks: "transcribe" and "translate" -> their tokens; empty for English-only models.
        previous: precedes earlier text.
        suppressed, suppressed_first: tokens that are never generated, or never generated first.
        most_initial: see `TimestampRules`.
    """

    start: int
    end: int
    no_timestamps: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    previous: int | None
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    most_initial: int | None

    @classmethod
    def read(cls, model: EasyDeLBaseModule) -> Self:
        """Read the tokens of a model.

        Raises:
            ConfigError: generation_config.json lacks a token that transcripts need.
        """
        stored = json.loads(model.generation_json) if model.generation_json else {}

        def special(name: str) -> Any:
            value = stored.get(name)
            value = special_token(model.config, name) if value is None else value
            if value is None:
                raise ConfigError(
                    f"generation_config.json of the checkpoint has no {name}, which transcripts "
                    "need: copy the file from the checkpoint that was fine-tuned"
                )
            return value[0] if isinstance(value, list) else value

        multilingual = stored.get("is_multilingual", True)
        suppressed = tuple(stored.get("suppress_tokens") or ())
        previous = stored.get("prev_sot_token_id")
        if previous is None and len(suppressed) >= 2:
            previous = suppressed[-2]
        return cls(
            start=special("decoder_start_token_id"),
            end=special("eos_token_id"),
            no_timestamps=special("no_timestamps_token_id"),
            languages={
                token.strip("<|>"): number
                for token, number in (stored.get("lang_to_id") or {}).items()
                if multilingual
            },
            tasks=(stored.get("task_to_id") or {}) if multilingual else {},
            previous=previous,
            suppressed=suppressed,
            suppressed_first=tuple(stored.get("begin_suppress_tokens") or ()),
            most_initial=stored.get("max_initial_timestamp_index"),
        )

    @property
    def first_time(self) -> int:
        """The token of time 0 of a window."""
        return self.no_timestamps + 1

    @property
    def rules(self) -> TimestampRules:
        """The rules of the tokens of times."""
        return TimestampRules(self.first_time, self.end, self.no_timestamps, self.most_initial)

    def language_token(self, language: str) -> int:
        """Return the token of a language, which is a code or an English name.

        Raises:
            ConfigError: the model does not know the language.
        """
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        name = language.lower().strip("<|>")
        code = name if name in self.languages else TO_LANGUAGE_CODE.get(name, name)
        if code not in self.languages:
            language_list = ", ".join(sorted(self.languages)) or "none: the model is English-only"
            raise ConfigError(
                f"language={language!r} is not a language of the model"
                f"{did_you_mean(name, [*self.languages, *TO_LANGUAGE_CODE])} (known: "
                f"{language_list})"
            )
        return self.languages[code]

    def task_token(self, task: str) -> int | None:
        """Return the token of a task; None for an English-only model, which transcribes.

        Raises:
            ConfigError: the model does not know the task.
        """
        task_names = list(self.tasks) or ["transcribe"]
        if task not in task_names:
            raise ConfigError(f"task={task!r} is not a task of the model: {', '.join(task_names)}")
        return self.tasks.get(task)


@dataclass(frozen=True)
class Attempt:
    """The tokens of a window: the text and its times, without the end token.

    Attributes:
        ended: whether the end token followed the tokens.
    """

    tokens: np.ndarray
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    ended: bool


@dataclass(frozen=True)
class SpeechRequest:
    """What is wanted of a recording; see `Transcriber.transcribe`.

    Attributes:
        initial: tokens before the text of each window.
        prompt: tokens of earlier text, which the caller gave.
        temperatures: temperatures of the attempts.
        timestamps: whether the text has times.
        conditioned: whether each window reads the text of the windows before it.
        thresholds: see `Thresholds`.
        max_new_tokens: most tokens of a window; None = all that the model has positions for.
        seed: seed of draws.
        sound_frames: frames with sound, if the times of tokens are wanted; None = no times.
        on_attempt: see `Transcriber.transcribe`.
    """

    initial: tuple[int, ...]
    prompt: tuple[int, ...]
    temperatures: tuple[float, ...]
    timestamps: bool
    conditioned: bool
    thresholds: Thresholds
    max_new_tokens: int | None
    seed: int
    sound_frames: int | None = None
    on_attempt: Callable[[], object] | None = None


class WhisperDecoder:
    """Decodes spectrograms with a Whisper model.

    Args:
        model: the model.
        decode: `tokens -> text`.
    """

    def __init__(self, model: Any, decode: Callable[[Sequence[int]], str]):
        self.model, self.text_of = model, decode
        self.tokens = WhisperTokens.read(model)
        self.window = _STRIDE * model.config.max_source_positions
        self.positions = model.config.max_target_positions
        self.aligner = TokenAligner.of(model)

    @cached_property
    def _programs(self) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
        graphdef, state = nnx.split(self.model)

        @jax.jit
        def encode(state: nnx.State, features: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state).model.encode({"input_features": features}).embeddings

        @jax.jit
        def probabilities(
            state: nnx.State, outputs: jax.Array, tokens: jax.Array, valid: jax.Array
        ) -> jax.Array:
            model = nnx.merge(graphdef, state)
            encoded = model.encode({"encoder_outputs": outputs})
            at = jnp.array([tokens.shape[1] - 1])
            output = model.decode(tokens, encoded=encoded, attention_mask=valid, logits_at=at)
            return jax.nn.softmax(output.logits[0].astype(jnp.float32))

        return state, encode, probabilities

    def encode_window(self, features: Float[np.ndarray, "m f"], seek: int) -> jax.Array:
        """Return the encoder output of the window that begins at frame `seek`, [1, t, d]."""
        part = features[:, seek : seek + self.window]
        part = np.pad(part, ((0, 0), (0, self.window - part.shape[1])))
        state, encode, _ = self._programs
        return encode(state, part[None])

    def next_probabilities(self, outputs: jax.Array, tokens: Sequence[int]) -> np.ndarray:
        """Return the probabilities of the token after some tokens, [v]."""
        ids = np.asarray([tokens], np.int32)
        state, _, probabilities = self._programs
        aligned = right_aligned(ids, np.ones(ids.shape, bool), bucket(ids.shape[1]))
        return np.asarray(probabilities(state, outputs, *aligned))

    def detect_language(self, outputs: jax.Array) -> str | None:
        """Return the most probable language of a window; None for an English-only model."""
        if not self.tokens.languages:
            return None
        probabilities = self.next_probabilities(outputs, [self.tokens.start])
        return max(
            self.tokens.languages, key=lambda code: probabilities[self.tokens.languages[code]]
        )

    def segments(
        self, features: Float[np.ndarray, "m f"], request: SpeechRequest
    ) -> Iterator[Segment]:
        """Yield the segments of a recording.

        Args:
            features: the spectrogram of the whole recording.
            request: what is wanted.
        """
        seek, frames, number = 0, features.shape[1], 0
        history = [np.asarray(request.prompt[1:])] if request.prompt else []
        conditioned = request.conditioned
        while seek < frames:
            count = min(frames - seek, self.window)
            outputs = self.encode_window(features, seek)
            prefix = self.prefix(request, history if conditioned else [])
            attempt = self.attempt(outputs, prefix, request)
            if attempt is None:  # silence
                seek += count
                continue
            conditioned = request.conditioned and attempt.temperature < 0.5
            pieces, moved = self.split_segments(attempt.tokens, count)
            times = self.token_times(outputs, prefix, attempt, request, seek)
            place = 0
            for begin, end, tokens in pieces:
                history.append(tokens)
                own_times = times[place : place + len(tokens)] if times is not None else None
                place += len(tokens)
                yield Segment(
                    id=number,
                    start=seek * FRAME + begin * STEP,
                    end=seek * FRAME + end * STEP,
                    text=self.text_of(self.words(tokens)),
                    tokens=tuple(map(int, tokens)),
                    temperature=attempt.temperature,
                    avg_logprob=attempt.avg_logprob,
                    compression_ratio=attempt.compression_ratio,
                    no_speech_prob=attempt.no_speech_prob,
                    seek=seek,
                    token_times=own_times,
                )
                number += 1
            seek += moved if moved > 0 else count

    def token_times(
        self,
        outputs: jax.Array,
        prefix: list[int],
        attempt: Attempt,
        request: SpeechRequest,
        seek: int,
    ) -> tuple[float, ...] | None:
        """Return the time of each token of a window in seconds; None if no times are wanted."""
        if request.sound_frames is None or self.aligner is None:
            return None
        count = (request.sound_frames - seek) // _STRIDE
        tokens = list(map(int, attempt.tokens))
        window_times = self.aligner.times(outputs, prefix, tokens, attempt.ended, count)
        return tuple((window_times + seek * FRAME).tolist())

    def words(self, tokens: Sequence[int] | np.ndarray) -> list[int]:
        """Return the tokens that are text."""
        return [int(token) for token in tokens if token < self.tokens.end]

    def prefix(self, request: SpeechRequest, history: Sequence[np.ndarray]) -> list[int]:
        """Return the tokens before the text of a window: earlier text, and the initial tokens."""
        token_table = self.tokens
        if history and token_table.previous is not None:
            parts, missing = [], self.positions // 2 - 1
            for tokens in reversed(history):
                if missing <= 0:
                    break
                # A segment that ends with two times repeats the last one in the next segment.
                repeated = len(tokens) > 2 and tokens[-2] >= token_table.first_time
                part = (tokens[:-1] if repeated else tokens)[-missing:]
                parts.append(part)
                missing -= len(part)
            earlier = np.concatenate(parts[::-1])
            return [token_table.previous, *map(int, earlier), *request.initial]
        return [*request.prompt, *request.initial]

    def attempt(
        self, outputs: jax.Array, prefix: list[int], request: SpeechRequest
    ) -> Attempt | None:
        """Decode a window, with higher temperatures if necessary; None = no speech."""
        token_table, limits = self.tokens, request.thresholds
        no_speech = 0.0
        if limits.no_speech is not None:
            start = prefix[: len(prefix) - len(request.initial) + 1]
            no_speech = float(
                self.next_probabilities(outputs, start)[token_table.no_timestamps - 1]
            )
        attempt = None
        for number, temperature in enumerate(request.temperatures):
            if request.on_attempt is not None:
                request.on_attempt()
            tokens, logprobs = self.generate_tokens(outputs, prefix, request, temperature, number)
            average = float(np.mean(logprobs))
            ratio = compression_ratio(tokens, self.model.config.vocab_size)
            ended = bool(tokens[-1] == token_table.end)
            text = tokens[:-1] if ended else tokens
            attempt = Attempt(text, temperature, average, ratio, no_speech, ended)
            guessed = limits.logprob is not None and average < limits.logprob
            repeats = limits.compression_ratio is not None and ratio > limits.compression_ratio
            if limits.no_speech is not None and guessed and no_speech > limits.no_speech:
                return None
            if not (guessed or repeats):
                break
        return attempt

    def generate_tokens(
        self,
        outputs: jax.Array,
        prefix: list[int],
        request: SpeechRequest,
        temperature: float,
        number: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the new tokens, with the end token, and their log-probabilities."""
        token_table, room = self.tokens, self.positions - len(prefix)
        draw = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        output = self.model.generate(
            inputs={"encoder_outputs": np.asarray(outputs)},
            decoder_input_ids=[prefix],
            max_new_tokens=min(room, request.max_new_tokens or room),
            eos_token_id=token_table.end,
            pad_token_id=token_table.end,
            suppress_tokens=list(token_table.suppressed) or None,
            begin_suppress_tokens=list(token_table.suppressed_first) or None,
            timestamp_rules=token_table.rules if request.timestamps else None,
            output_logprobs=True,
            logprobs_mode="constrained_logprobs",
            seed=request.seed + number,
            **draw,
        )
        assert output.logprobs is not None
        return output.sequences[0, len(prefix) :], output.logprobs[0]

    def split_segments(
        self, tokens: np.ndarray, count: int
    ) -> tuple[list[tuple[float, float, np.ndarray]], int]:
        """Cut the tokens of a window into segments.

        Args:
            tokens: the text and its times.
            count: frames of the window.

        Returns:
            Start and end in steps after the begin of the window, and the tokens, of each segment;
            and the number of frames until the begin of the next window.
        """
        first = self.tokens.first_time
        is_time = tokens >= first
        ends = list(np.flatnonzero(is_time[:-1] & is_time[1:]) + 1)
        if not ends:
            times = np.flatnonzero(is_time)
            last = float(int(count * FRAME / STEP))
            if len(times) and tokens[times[-1]] != first:
                last = float(tokens[times[-1]] - first)
            return [(0.0, last, tokens)], count
        closed = bool(len(tokens) > 1 and not is_time[-2] and is_time[-1])
        if closed:
            ends.append(np.intp(len(tokens)))
        else:
            ends[-1] += 1
        pieces, begin = [], 0
        for number, end in enumerate(ends):
            piece = tokens[begin:end]
            last = -1 if number < len(ends) - 1 or closed else -2
            pieces.append((float(piece[0] - first), float(piece[last] - first), piece))
            begin = end
        moved = count if closed else int(tokens[begin - 2] - first) * _STRIDE
        return pieces, moved


def compression_ratio(tokens: np.ndarray, vocab_size: int) -> float:
    """Return the bytes of the tokens divided by their compressed size."""
    width = int(math.log2(vocab_size) / 8) + 1
    data = b"".join(int(token).to_bytes(width, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))
