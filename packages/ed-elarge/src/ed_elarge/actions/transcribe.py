"""The action `transcribe`: print the texts of recordings."""

from __future__ import annotations

import os

from ed_data.rows.example import RowAudio
from ed_data.rows.recordings import read_samples
from ed_esurge.command.program import show_result
from ed_infra.errors import ConfigError

from ed_elarge.actions.execution import Session
from ed_elarge.config.action_options import TranscribeOptions


def transcribe(session: Session, options: TranscribeOptions) -> None:
    """Print the text of each recording.

    Raises:
        ConfigError: The model does not support an option.
        DataError: A recording cannot be decoded.
    """
    from ed_esurge.speech.engine import SPEECH_TASKS
    from ed_models.speech import Transcriber

    from ed_elarge.building.engines import speech_processor

    elm = session.elm
    model = elm.part("model")
    if type(model).model_task not in SPEECH_TASKS:
        raise ConfigError(f"{type(model).__name__} reads no recordings: use a model of speech")
    transcriber = Transcriber(model, speech_processor(elm))
    for file in options.files:
        audio = RowAudio(os.path.realpath(file), file)
        samples = read_samples(audio, transcriber.sampling_rate)
        transcript = transcriber.transcribe(samples, language=options.language, task=options.task)
        session.summary.record_sample(file, transcript.text)
        show_result(f"{file}: {transcript.text}")
