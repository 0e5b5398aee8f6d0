"""`Transcriber`: one interface to all models for speech.

Legend: n samples, m mel bins, f frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from jaxtyping import Float

from ed_models.checkpoints import hub
from ed_models.checkpoints.checks import detect_task
from ed_models.speech.pieces import LabelDecoder, PieceReader, SampleDecoder
from ed_models.speech.transcript import Segment, Transcript
from ed_models.speech.whisper import FRAME, SpeechRequest, Thresholds, WhisperDecoder
from ed_models.speech.words import split_words
from ed_models.tasks.ctc import CTCModel

#: Temperatures of the attempts to decode a window, if the caller gives none.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Transcriber:
    """Turns recordings into text.

    Args:
        model: a model for speech: Whisper, Moonshine, or a CTC model.
        processor: the processor of the checkpoint, with `feature_extractor` and `tokenizer`.
        thresholds: Whisper: when an attempt is repeated with the next temperature.
        condition_on_prev_tokens: Whisper: whether a window reads the text of the windows before it.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        thresholds: Thresholds = Thresholds(),  # noqa: B008
        condition_on_prev_tokens: bool = True,
    ):
        self.model, self.processor = model, processor
        self.thresholds, self.conditioned = thresholds, condition_on_prev_tokens
        self.extract = processor.feature_extractor
        reader = PieceReader(self.extract, self.sampling_rate)
        self.decoder: WhisperDecoder | LabelDecoder | SampleDecoder
        if isinstance(model, CTCModel):
            self.decoder = LabelDecoder(model, reader, self.text_of_labels)
        elif "input_features" in model.input_names:
            self.decoder = WhisperDecoder(model, self.get_text)
        else:
            self.decoder = SampleDecoder(model, reader, self.get_text)

    @property
    def sampling_rate(self) -> int:
        """Samples of a second that the model reads."""
        return int(self.extract.sampling_rate)

    @property
    def task(self) -> TaskType:
        """The task of the model."""
        if isinstance(self.decoder, LabelDecoder):
            return TaskType.CTC
        return TaskType.SPEECH_SEQUENCE_TO_SEQUENCE

    @property
    def options(self) -> frozenset[str]:
        """Names of the arguments of `transcribe` that depend on the model."""
        if isinstance(self.decoder, WhisperDecoder):
            names = ("language", "task", "prompt", "timestamps", "word_timestamps")
            return frozenset((*names, "max_new_tokens"))
        return frozenset()

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that callers may name; empty without a choice."""
        if isinstance(self.decoder, WhisperDecoder):
            return tuple(self.decoder.tokens.languages)
        return ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks: "transcribe", and "translate" if the model translates to English."""
        if isinstance(self.decoder, WhisperDecoder) and self.decoder.tokens.tasks:
            return tuple(self.decoder.tokens.tasks)
        return ("transcribe",)

    def get_text(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, without special tokens."""
        ids = [int(token) for token in tokens]
        return self.processor.tokenizer.decode(ids, skip_special_tokens=True)

    def text_of_labels(self, labels: Sequence[int]) -> str:
        """Return the text of labels that were merged already; unknown labels are `<unk>`."""
        return self.processor.tokenizer.decode(list(labels), group_tokens=False)

    def transcribe(
        self,
        samples: Float[np.ndarray, " n"],
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        temperature: float | Sequence[float] | None = None,
        timestamps: bool = False,
        word_timestamps: bool = False,
        max_new_tokens: int | None = None,
        seed: int = 0,
        on_segment: Callable[[Segment], object] | None = None,
        on_attempt: Callable[[], object] | None = None,
    ) -> Transcript:
        """Return the text of a recording of any length.

        Args:
            samples: float32 samples from -1 to 1, `sampling_rate` of them for a second.
            language: a code or an English name; None = the model detects the language. Whisper
                only.
            task: "transcribe", or "translate" to English. Whisper only.
            prompt: earlier text, or names as the recording spells them. Whisper only.
            temperature: temperature of the draws; 0 = greedy. Whisper accepts several, tries the
                next one if an attempt fails its `thresholds`, and uses `TEMPERATURES` by default.
            timestamps: whether Whisper cuts the text into segments with times. A recording of more
                than 30 seconds always has times.
            word_timestamps: whether segments have words with times; implies `timestamps`. Requires
                a Whisper checkpoint with `alignment_heads` in generation_config.json.
            max_new_tokens: most tokens of a window. Whisper only.
            seed: seed of the draws.
            on_segment: gets each segment as soon as it is complete. An exception that this function
                raises ends the transcription.
            on_attempt: is called before each attempt to decode a window or a piece. An exception
                that this function raises ends the transcription.

        Raises:
            ConfigError: the samples are not one-dimensional, or the model does not support an
                argument.
        """
        samples = np.asarray(samples, np.float32)
        if samples.ndim != 1 or not len(samples):
            raise ConfigError(
                f"samples have shape {list(samples.shape)}; they must be [n], one channel"
            )
        temperatures = _temperatures(temperature)
        if isinstance(self.decoder, WhisperDecoder):
            features = self.features(samples)
            language, request = self.request(
                self.decoder,
                features,
                language=language,
                task=task,
                prompt=prompt,
                timestamps=timestamps or word_timestamps,
                sound_frames=self._sound_frames(samples) if word_timestamps else None,
                temperatures=temperatures or TEMPERATURES,
                max_new_tokens=max_new_tokens,
                seed=seed,
                on_attempt=on_attempt,
            )
            segment_source = self.decoder.segments(features, request)
        else:
            whisper_options = {
                "language": language,
                "prompt": prompt,
                "max_new_tokens": max_new_tokens,
            }
            whisper_options["task"] = None if task == "transcribe" else task
            whisper_options["timestamps"] = timestamps or None
            whisper_options["word_timestamps"] = word_timestamps or None
            for name, value in whisper_options.items():
                if value is not None:
                    raise ConfigError(
                        f"{name}={value!r} has no effect: {type(self.model).__name__} only "
                        "transcribes, in the language of its training"
                    )
            segment_source = self.pieces(samples, temperatures, seed, on_attempt)
        segments = []
        for segment in segment_source:
            if word_timestamps:
                segment = self.with_words(segment, language)
            segments.append(segment)
            if on_segment is not None:
                on_segment(segment)
        duration = len(samples) / self.sampling_rate
        return Transcript(self.whole_text(segments), language, duration, tuple(segments))

    def _sound_frames(self, samples: Float[np.ndarray, " n"]) -> int:
        """Return the frames of a recording, without those of padding.

        Raises:
            ConfigError: the checkpoint has no valid `alignment_heads`.
        """
        assert isinstance(self.decoder, WhisperDecoder)
        if self.decoder.aligner is None:
            raise ConfigError(
                "word_timestamps requires alignment_heads in generation_config.json: copy them "
                "from the checkpoint that was fine-tuned, or request times of segments"
            )
        self.decoder.aligner.check()
        return -(-len(samples) // self.extract.hop_length)

    def with_words(self, segment: Segment, language: str | None) -> Segment:
        """Return a segment with the words of its tokens."""
        assert isinstance(self.decoder, WhisperDecoder)
        assert segment.token_times is not None
        # A token begins when the token before it ends.
        ends = segment.token_times
        begins = (segment.seek * FRAME, *ends[:-1])
        end = self.decoder.tokens.end
        text = [
            (token, (round(a, 2), round(b, 2)))
            for token, a, b in zip(segment.tokens, begins, ends, strict=True)
            if token < end
        ]
        tokens, times = [token for token, _ in text], [pair for _, pair in text]
        return replace(segment, words=split_words(tokens, times, self.get_text, language))

    def pieces(
        self,
        samples: Float[np.ndarray, " n"],
        temperatures: Sequence[float],
        seed: int,
        on_attempt: Callable[[], object] | None,
    ) -> Iterator[Segment]:
        """Return the segments of a model that reads samples."""
        if len(temperatures) > 1:
            raise ConfigError(
                f"temperature has {len(temperatures)} values, but {type(self.model).__name__} "
                "decodes once: pass one"
            )
        temperature = temperatures[0] if temperatures else 0.0
        if isinstance(self.decoder, SampleDecoder):
            return self.decoder.segments(samples, temperature, seed, on_attempt)
        if temperature > 0:
            raise ConfigError(
                f"temperature={temperature} has no effect: {type(self.model).__name__} does not "
                "draw tokens"
            )
        assert isinstance(self.decoder, LabelDecoder)
        return self.decoder.segments(samples, on_attempt)

    def features(self, samples: Float[np.ndarray, " n"]) -> Float[np.ndarray, "m f"]:
        """Return the spectrogram; a short recording is padded to one window."""
        short = len(samples) <= self.extract.n_samples
        form = {} if short else {"truncation": False, "padding": "longest"}
        extracted_features = self.extract(
            samples, sampling_rate=self.sampling_rate, return_tensors="np", **form
        )
        return np.asarray(extracted_features["input_features"][0], np.float32)

    def request(
        self,
        decoder: WhisperDecoder,
        features: Float[np.ndarray, "m f"],
        *,
        language: str | None,
        task: str,
        prompt: str | None,
        timestamps: bool,
        **options: Any,
    ) -> tuple[str | None, SpeechRequest]:
        """Return the language of a recording, and what is wanted of the recording."""
        token_table = decoder.tokens
        initial, task_token = [token_table.start], token_table.task_token(task)
        if language is not None:
            token = token_table.language_token(language)
            language = next(
                code for code, number in token_table.languages.items() if number == token
            )
        else:
            language = decoder.detect_language(decoder.encode_window(features, 0))
        if language is not None:
            initial.append(token_table.languages[language])
        initial += [] if task_token is None else [task_token]
        timestamps = timestamps or features.shape[1] > decoder.window
        initial += [] if timestamps else [token_table.no_timestamps]
        request = SpeechRequest(
            initial=tuple(initial),
            prompt=self.prompt_tokens(decoder, prompt) if prompt else (),
            timestamps=timestamps,
            conditioned=self.conditioned,
            thresholds=self.thresholds,
            **options,
        )
        return language, request

    def prompt_tokens(self, decoder: WhisperDecoder, prompt: str) -> tuple[int, ...]:
        """Return the tokens of earlier text: the last ones if the text is long."""
        previous = decoder.tokens.previous
        if previous is None:
            raise ConfigError("prompt has no effect: the checkpoint has no prev_sot_token_id")
        ids = self.processor.tokenizer(" " + prompt.strip(), add_special_tokens=False)["input_ids"]
        if wrong := [token for token in ids if token >= decoder.tokens.end]:
            raise ConfigError(
                f"prompt contains the special token "
                f"{self.processor.tokenizer.convert_ids_to_tokens(wrong[0])!r}: remove the token"
            )
        return previous, *ids[-(decoder.positions // 2 - 1) :]

    def whole_text(self, segments: Sequence[Segment]) -> str:
        """Return the text of all segments; a character may span two of them."""
        if isinstance(self.decoder, WhisperDecoder):
            tokens = [token for s in segments for token in self.decoder.words(s.tokens)]
            return self.get_text(tokens).strip()
        return " ".join(s.text.strip() for s in segments).strip()


def load_transcriber(
    path: str | Path, *, revision: str | None = None, **options: Any
) -> Transcriber:
    """Load a model for speech and its processor.

    Args:
        path: a directory or a hub repository.
        revision: branch, tag or commit of the repository.
        options: options of `from_pretrained`.

    Raises:
        CheckpointError: the checkpoint is not a model for speech.
    """
    import transformers
    from ed_infra.errors import CheckpointError

    from ed_models.auto import AutoEasyDeLModelForCTC, AutoEasyDeLModelForSpeechSeq2Seq

    directory = hub.resolve(path, weights=True, revision=revision)
    auto = {
        TaskType.CTC: AutoEasyDeLModelForCTC,
        TaskType.SPEECH_SEQUENCE_TO_SEQUENCE: AutoEasyDeLModelForSpeechSeq2Seq,
    }
    task = detect_task(directory)
    if task not in auto:
        raise CheckpointError(
            f"{path} is a model for {task}, not for speech: pass a checkpoint such as Whisper"
        )
    model = auto[task].from_pretrained(directory, **options)
    return Transcriber(model, transformers.AutoProcessor.from_pretrained(directory))


def _temperatures(temperature: float | Sequence[float] | None) -> tuple[float, ...]:
    """Return the temperatures of the attempts; () = the default.

    Raises:
        ConfigError: a temperature is not between 0 and 2.
    """
    if temperature is None:
        return ()
    values = (temperature,) if isinstance(temperature, int | float) else tuple(temperature)
    for value in values:
        if not 0 <= value <= 2:
            raise ConfigError(f"temperature is {value}; it must be between 0 and 2")
    return tuple(map(float, values))
