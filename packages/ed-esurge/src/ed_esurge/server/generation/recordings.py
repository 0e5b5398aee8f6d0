"""Recordings in chat requests: content parts to spectrograms and placeholder tokens.

A recording is the base64 text of a WAV or MP3 file (`input_audio`, as in OpenAI's API). The limits
of bytes and seconds are checked before the whole file is decoded. As in `transformers`, a recording
is padded to a multiple of the length that the encoder reads, such as 30 seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from ed_models.modalities.audio import RecordingForm

from ed_esurge.children.process import JobGroup
from ed_esurge.core.commands import EncoderInput
from ed_esurge.server.generation.media import (
    IMAGE,
    RECORDING,
    ProcessedMedium,
    build_encoder_inputs,
    expand_placeholders,
    media_parts,
)
from ed_esurge.server.generation.requests import AudioPart, ChatMessage
from ed_esurge.speech.audio import decode_audio
from ed_esurge.speech.decoder_process import DecoderProcess
from ed_esurge.speech.errors import AudioError, AudioTooLongError
from ed_esurge.speech.riff import WavFile

#: Limits of one request: number of recordings, and bytes of each recording.
MAX_RECORDINGS, MAX_RECORDING_BYTES = 16, 2**25


@dataclass(frozen=True)
class RecordingSource:
    """The encoded bytes of a recording, and the field of the request."""

    data: bytes
    kind: Literal["wav", "mp3"]
    param: str


class ChatRecordings:
    """Reads the recordings of chat requests for one model.

    Args:
        form: the recordings that the model reads.
        extractor: feature extractor of the checkpoint, or a processor that has one; None = nothing
            was loaded.
        tokenizer: the tokenizer of the model.
        max_model_len: maximum number of tokens of a sequence, which limits the seconds.
    """

    accepts_images = False

    def __init__(
        self, form: RecordingForm, extractor: Any, tokenizer: Any, max_model_len: int
    ) -> None:
        self._form = form
        self._extract = getattr(extractor, "feature_extractor", extractor)
        self._text: str = tokenizer.convert_ids_to_tokens(form.token)
        self._most = max(1, max_model_len // form.length)
        self._decoder = DecoderProcess()

    def start(self) -> None:
        """Start the process that reads recordings, if the model accepts recordings."""
        if self._extract is not None:
            self._decoder.start()

    async def sources(self, messages: Sequence[ChatMessage]) -> list[RecordingSource]:
        """Return the encoded recordings of a conversation in order.

        Raises:
            APIError: 400, the model does not accept images, there are too many recordings, or the
                base64 text of a recording is invalid or too long.
        """
        recordings: list[RecordingSource] = []
        for path, part in media_parts(messages):
            if not isinstance(part, AudioPart):
                IMAGE.refuse("this model does not accept images: send text and audio only", path)
            param = f"{path}.input_audio"
            if part.input_audio is None:
                RECORDING.refuse("is missing", param)
            if self._extract is None:
                RECORDING.refuse(
                    "this model has no feature extractor: load the engine from a checkpoint with "
                    "preprocessor_config.json",
                    param,
                )
            if len(recordings) == MAX_RECORDINGS:
                RECORDING.refuse(f"a request has at most {MAX_RECORDINGS} recordings", param)
            data = RECORDING.decode_base64(
                part.input_audio.data, MAX_RECORDING_BYTES, f"{param}.data"
            )
            recordings.append(RecordingSource(data, part.input_audio.format, param))
        return recordings

    def expand_placeholders(
        self, text: str, sources: Sequence[RecordingSource], group: JobGroup | None = None
    ) -> tuple[str, list[ProcessedMedium]]:
        """Process the recordings, and replace the token of each recording by those of its features.

        Args:
            text: the rendered conversation, with one placeholder token per recording. The texts of
                users contain no placeholder tokens, see `ChatTemplate.render`.
            sources: at least one recording, see `sources`.
            group: the jobs that are cancelled together.

        Raises:
            APIError: 400, a recording is invalid, or the template has no placeholder for it.
        """
        return expand_placeholders(
            text, self._text, sources, partial(self._process_recording, group=group), RECORDING
        )

    def build_encoder_inputs(
        self, tokens: Sequence[int], recordings: Sequence[ProcessedMedium]
    ) -> tuple[EncoderInput, ...]:
        """Return the encoder inputs of a prompt's recordings; see `media.build_encoder_inputs`."""
        return build_encoder_inputs(
            tokens, recordings, self._form.token, {self._form.token}, RECORDING
        )

    def _process_recording(
        self, source: RecordingSource, group: JobGroup | None
    ) -> ProcessedMedium:
        """Return the parts of a recording in the form that the model reads."""
        rate, hop = int(self._extract.sampling_rate), int(self._extract.hop_length)
        samples = self._form.shape[1] * hop
        parts = self._most if self._form.includes_padding else 1
        seconds = parts * samples / rate
        if (source.kind == "wav") != (WavFile.read(source.data) is not None):
            RECORDING.refuse(f"the data is no {source.kind} file: set the format", source.param)
        try:
            sound = decode_audio(source.data, rate, seconds, self._decoder, group)
        except AudioTooLongError:
            RECORDING.refuse(
                f"the recording is longer than {seconds:g} seconds, the limit", source.param
            )
        except AudioError as error:
            RECORDING.refuse(str(error), source.param)
        output = self._extract(
            sound,
            sampling_rate=rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=samples,
            return_tensors="np",
        )
        spectrogram = np.asarray(output["input_features"][0], np.float32)
        count = -(-len(sound) // hop)
        items, length = self._form.split_recording(spectrogram, count)
        return ProcessedMedium(items, self._text * (length * len(items)), length, source.param)
