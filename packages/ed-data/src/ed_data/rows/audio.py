"""The recording of a row: a file, bytes or samples in a field."""

from __future__ import annotations

from typing import Any

from ed_data.config.source import Inform
from ed_data.errors import DataError, listing
from ed_data.rows.example import RowAudio
from ed_data.rows.media_files import found_file
from ed_data.rows.recordings import header
from ed_data.schema import AUDIO, Audio, Row

_KEY = "audio_field"


class AudioReader:
    """Reads the recordings of the rows of an inform.

    Args:
        inform: `audio_field` names the field; the limits of durations drop rows.
    """

    def __init__(self, inform: Inform) -> None:
        self.field = inform.audio_field or AUDIO
        self._least = inform.min_duration_in_seconds
        self._most = inform.max_duration_in_seconds

    def of_row(self, row: Row, folder: str, where: str) -> RowAudio | str:
        """Return the recording of a row, or the reason to drop the row.

        Args:
            row: the row.
            folder: folder of the row's file. Paths are relative to this folder or to the working
                folder.
            where: the row, for messages.

        Raises:
            DataError: the field is missing, its value is not a recording, the file does not exist,
                or the duration is limited and the recording cannot be read.
        """
        if self.field not in row:
            raise DataError(
                f"{where}: there is no field {self.field!r} with a recording (fields: "
                f"{listing(row)}); set audio_field, or correct the row",
                (_KEY,),
            )
        value = row[self.field]
        if value is None:
            return f"{self.field!r} is null"
        source = self._source(value, folder, where)
        name = f", {source!r}" if isinstance(source, str) else ""
        audio = RowAudio(source, f"{where}{name}")
        if self._most is None and not self._least:
            return audio
        seconds = header(audio).seconds
        if self._most is not None and seconds > self._most:
            return f"longer than max_duration_in_seconds ({self._most:g})"
        if seconds < self._least:
            return f"shorter than min_duration_in_seconds ({self._least:g})"
        return audio

    def _source(self, value: object, folder: str, where: str) -> Audio:
        if isinstance(value, str):
            return found_file(value, folder, where, kind="recording", key=_KEY)
        if isinstance(value, bytes) and value:
            return value
        if isinstance(value, dict):
            if value.get("array") is not None:
                return self._samples(value, where)
            if value.get("bytes"):
                return {"bytes": value["bytes"]}
            if isinstance(value.get("path"), str):
                return found_file(value["path"], folder, where, kind="recording", key=_KEY)
        text = f"{type(value).__name__} {value!r}"
        raise DataError(
            f"{where}: {self.field!r} must be a recording: a path, bytes, {{path, bytes}}, or "
            f"{{array, sampling_rate}}, got {text if len(text) < 80 else text[:77] + '…'}; correct "
            "the row, or set audio_field",
            (_KEY,),
        )

    def _samples(self, value: dict[str, Any], where: str) -> Audio:
        import numpy as np  # not needed to check a run file

        rate = value.get("sampling_rate")
        try:
            samples = np.asarray(value["array"])
        except ValueError:  # lists of different lengths
            samples = np.empty(0)
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
            raise DataError(
                f"{where}: {self.field!r} has the sampling_rate {rate!r}; it must be the number of "
                "samples of a second",
                (_KEY,),
            )
        if samples.ndim != 1 or samples.dtype.kind != "f" or not samples.size:
            raise DataError(
                f"{where}: the array of {self.field!r} has shape {list(samples.shape)} and dtype "
                f"{samples.dtype}; it must be one channel of floating-point samples from -1 to 1",
                (_KEY,),
            )
        return {"array": samples, "sampling_rate": rate}
