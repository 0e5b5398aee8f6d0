"""Options of a transcription. Imports neither jax nor transformers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TranscriptionOptions:
    """Options of a transcription; see `ed_models.speech.Transcriber.transcribe`.

    Attributes:
        temperature: None or 0 = greedy, and the model's higher temperatures after failed attempts.
        timestamps: whether the text has times. A model without this option has its own segments.
        word_timestamps: whether words have times.
    """

    task: str = "transcribe"
    language: str | None = None
    prompt: str | None = None
    temperature: float | None = None
    timestamps: bool = False
    word_timestamps: bool = False
    seed: int = 0
