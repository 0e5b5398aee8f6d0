"""Options of the evaluation of transcripts, for models of speech. Free of jax."""

from __future__ import annotations

from ed_infra.options import Count
from pydantic import ValidationInfo, field_validator

from ed_trainers.options.base import StrictFlag, TrainingArguments, conflict


class TranscriptArguments(TrainingArguments):
    """Transcripts of held-out recordings."""

    predict_with_generate: StrictFlag = False
    """For models of speech: an evaluation also transcribes the held-out recordings, with greedy
    tokens, and logs `eval_wer` and `eval_cer`, the error rates of words and characters."""
    generation_max_length: Count | None = None
    """With `predict_with_generate`: most tokens of a transcript, with the tokens of language and
    task. None: the positions of the decoder."""

    @field_validator("generation_max_length")
    @classmethod
    def _of_transcripts(cls, value: int | None, info: ValidationInfo) -> int | None:
        # An invalid `predict_with_generate` is missing in `data`, and reported on its own.
        if value is not None and info.data.get("predict_with_generate") is False:
            raise conflict("generation_max_length has no effect without predict_with_generate")
        return value
