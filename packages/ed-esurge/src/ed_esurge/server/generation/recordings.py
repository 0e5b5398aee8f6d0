"""Recordings in chat requests: content parts to spectrograms and placeholder tokens.

A recording is the base64 text of a WAV or MP3 file (`input_audio`, as in OpenAI's API). The limits
of bytes and seconds are checked before the whole file is decoded. As in `transformers`, a recording
is padded to a multiple of the length that the encoder reads, such as 30 seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from ed_models.modalities.audio import RecordingForm

from ed_esurge.children.process import JobGroup
from ed_esurge.server.generation.content_parts import AudioPart
from ed_esurge.server.generation.media import (
    MEDIUM_KINDS,
    RECORDING,
    ChatMedia,
    MediumKind,
    ProcessedMedium,
    media_parts,
)
from ed_esurge.server.generation.requests import ChatMessage
from ed_esurge.speech.audio import decode_audio
from ed_esurge.speech.decoder_process import DecoderProcess
from ed_esurge.speech.riff import WavFile
from ed_esurge.speech.samples import AudioError, AudioTooLongError
from ed_esurge.tokenizer import Tokenizer

#: Limits of one request: number of recordings, and bytes of each recording.
MAX_RECORDINGS, MAX_RECORDING_BYTES = 16, 2**25


@dataclass(frozen=True)
class RecordingSource:
    """The encoded bytes of a recording, and the field of the request."""

    data: bytes
    kind: Literal["wav", "mp3"]
    param: str


class ChatRecordings(ChatMedia[RecordingSource]):
    """Reads the recordings of chat requests for one model.

    Args:
        form: the recordings that the model reads.
        extractor: feature extractor of the checkpoint, or a processor that has one; None = nothing
            was loaded.
        tokenizer: the tokenizer of the model.
        max_model_len: maximum number of tokens of a sequence, which limits the seconds.
    """

    def __init__(
        self, form: RecordingForm, extractor: Any, tokenizer: Tokenizer, max_model_len: int
    ) -> None:
        self._form = form
        self._extract = getattr(extractor, "feature_extractor", extractor)
        self._placeholder = tokenizer.convert_ids_to_tokens(form.token) or ""
        self.placeholders = {self._placeholder: RECORDING}
        self.feature_tokens = self.tokens_of_item = {form.token}
        self._most = max(1, max_model_len // form.length)
        self._decoder = DecoderProcess()

    def start(self) -> None:
        """See `ChatMedia.start`."""
        if self._extract is not None:
            self._decoder.start()

    async def sources(self, messages: Sequence[ChatMessage]) -> list[RecordingSource]:
        """See `ChatMedia.sources`."""
        recordings: list[RecordingSource] = []
        for path, part in media_parts(messages):
            if not isinstance(part, AudioPart):
                kind = MEDIUM_KINDS[type(part)]
                kind.refuse(
                    f"this model does not accept {kind.noun}s: send text and audio only", path
                )
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

    def get_kind(self, source: RecordingSource) -> MediumKind:
        """See `ChatMedia.get_kind`."""
        return RECORDING

    def process_medium(
        self, source: RecordingSource, group: JobGroup | None, *, is_single: bool
    ) -> ProcessedMedium:
        """See `ChatMedia.process_medium`."""
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
        return ProcessedMedium(
            items, self._placeholder * (length * len(items)), length, source.param, RECORDING
        )
