"""The recordings of a row: files, bytes or samples, in a field or in the parts of chat messages."""

from __future__ import annotations

from typing import Any

from ed_data.config.source import Inform
from ed_data.errors import DataError, listing
from ed_data.media_access import RemoteFile
from ed_data.rows.example import RowAudio
from ed_data.rows.media_files import MediaFolder
from ed_data.rows.media_parts import MediaParts
from ed_data.rows.recordings import header
from ed_data.schema import AUDIO, AUDIOS, Audio, Content, Row

_KEY = "audio_field"
#: Options of an inform about recordings.
RECORDING_KEYS = frozenset((_KEY, "max_duration_in_seconds", "min_duration_in_seconds"))
#: The recording parts of messages.
_PARTS = MediaParts(
    AUDIO,
    "recording",
    ("audio", "audio_url", "input_audio"),
    ("audio", "audio_url", "input_audio", "url", "path", "base64", "bytes"),
    _KEY,
)


class AudioReader:
    """Reads the recordings of the rows of an inform.

    Args:
        inform: `audio_field` names the field; the limits of durations drop rows.

    Attributes:
        field: the field with the recording of a transcript.
    """

    def __init__(self, inform: Inform) -> None:
        self.field = inform.audio_field or AUDIO
        self._named = inform.audio_field is not None
        self._least = inform.min_duration_in_seconds
        self._most = inform.max_duration_in_seconds

    def read_recording(self, row: Row, folder: MediaFolder, location: str) -> RowAudio | str:
        """Return the recording of a row with its transcript, or the reason to drop the row.

        Args:
            row: the row.
            folder: the folder whose files the row may name.
            location: the row, for messages.

        Raises:
            DataError: the field is missing, its value is not a recording, the file does not exist,
                or the duration is limited and the recording cannot be read.
        """
        if self.field not in row:
            raise DataError(
                f"{location}: there is no field {self.field!r} with a recording (fields: "
                f"{listing(row)}); set audio_field, or correct the row",
                (_KEY,),
            )
        value = row[self.field]
        if value is None:
            return f"{self.field!r} is null"
        source = self._source(value, repr(self.field), folder, location)
        name = f", {source!r}" if isinstance(source, str) else ""
        name = f", {source.address!r}" if isinstance(source, RemoteFile) else name
        audio = RowAudio(source, f"{location}{name}")
        return self._refusal(audio) or audio

    def read_chat(
        self, row: Row, fields: dict[str, Content], folder: MediaFolder, location: str
    ) -> tuple[dict[str, Content], list[RowAudio]] | str:
        """Return the fields with plain audio parts, and the recordings in the order of the parts;
        or the reason to drop the row.

        A part contains its recording (`{"type": "audio", "path": …}`, `{"type": "input_audio",
        "input_audio": {"data": …}}`), or refers to the next recording in `audio_field`, by default
        in `audios` or `audio`.

        Raises:
            DataError: a recording is missing, is left over, or cannot be found.
        """
        parts = _PARTS.of(fields)
        if not parts:
            return fields, []
        name = self.field if self._named or row.get(AUDIOS) is None else AUDIOS
        value = row.get(name)
        values = value if isinstance(value, list | tuple) else [] if value is None else [value]
        listed = [self._source(item, repr(name), folder, location) for item in values]
        sources = _PARTS.sources(
            parts,
            listed,
            lambda part_value: self._source(part_value, "an audio part", folder, location),
            location,
            name,
            named=self._named,
        )
        count, recordings = len(sources), list[RowAudio]()
        for number, source in enumerate(sources, 1):
            audio = RowAudio(source, f"{location}, recording {number} of {count}")
            refusal = self._refusal(audio)
            if refusal is not None:
                return refusal
            recordings.append(audio)
        return _PARTS.simplify_parts(fields), recordings

    def _refusal(self, audio: RowAudio) -> str | None:
        """Return the reason to drop a row with this recording; None = the row is kept."""
        if self._most is None and not self._least:
            return None
        seconds = header(audio).seconds
        if self._most is not None and seconds > self._most:
            return f"longer than max_duration_in_seconds ({self._most:g})"
        if seconds < self._least:
            return f"shorter than min_duration_in_seconds ({self._least:g})"
        return None

    def _source(self, value: object, name: str, folder: MediaFolder, location: str) -> Audio:
        if isinstance(value, str):
            return folder.locate(value, location, kind="recording", key=_KEY)
        if isinstance(value, bytes) and value:
            return value
        if isinstance(value, dict):
            if value.get("array") is not None:
                return self._samples(value, name, location)
            if value.get("bytes"):
                return {"bytes": value["bytes"]}
            if isinstance(value.get("path"), str):
                return folder.locate(value["path"], location, kind="recording", key=_KEY)
        text = f"{type(value).__name__} {value!r}"
        raise DataError(
            f"{location}: {name} must be a recording: a path, bytes, {{path, bytes}}, or "
            f"{{array, sampling_rate}}, got {text if len(text) < 80 else text[:77] + '…'}; correct "
            "the row, or set audio_field",
            (_KEY,),
        )

    def _samples(self, value: dict[str, Any], name: str, location: str) -> Audio:
        import numpy as np  # not needed to check a run file

        rate = value.get("sampling_rate")
        try:
            samples = np.asarray(value["array"])
        except ValueError:  # lists of different lengths
            samples = np.empty(0)
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
            raise DataError(
                f"{location}: {name} has the sampling_rate {rate!r}; it must be the number of "
                "samples of a second",
                (_KEY,),
            )
        if samples.ndim != 1 or samples.dtype.kind != "f" or not samples.size:
            raise DataError(
                f"{location}: the array of {name} has shape {list(samples.shape)} and dtype "
                f"{samples.dtype}; it must be one channel of floating-point samples from -1 to 1",
                (_KEY,),
            )
        return {"array": samples, "sampling_rate": rate}
