"""The result of a transcription."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpokenWord:
    """A word with the punctuation next to it; the times are in seconds."""

    text: str
    start: float
    end: float


@dataclass(frozen=True)
class Segment:
    """A piece of a transcript; the names are those of OpenAI's `verbose_json`.

    Attributes:
        id: number of the segment, from 0.
        start, end: times in seconds.
        text: the words.
        tokens: token ids, with those of times.
        temperature: the temperature of the draws; 0 = greedy.
        avg_logprob: mean log-probability of the tokens, in nats.
        compression_ratio: bytes of the tokens divided by their compressed size; text that repeats
            itself has a high ratio.
        no_speech_prob: probability that the window contains no speech; 0 if the model does not
            estimate it.
        seek: start of the window of the segment, in frames of 10 ms.
        token_times: time of each token in seconds, and
        words: the words with their times; None unless they were requested.
    """

    id: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 1.0
    no_speech_prob: float = 0.0
    seek: int = 0
    token_times: tuple[float, ...] | None = None
    words: tuple[SpokenWord, ...] | None = None


@dataclass(frozen=True)
class Transcript:
    """The text of a recording.

    Attributes:
        text: the whole text.
        language: code of the language, such as "en"; None if the model does not know languages.
        duration: length of the recording in seconds.
        segments: the pieces, in order.
    """

    text: str
    language: str | None
    duration: float
    segments: tuple[Segment, ...]
