"""Formats of transcripts: verbose JSON, subtitles (SubRip, WebVTT), and the pieces of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ed_models.speech import Segment, Transcript


def verbose(
    transcript: Transcript, task: str, granularities: Sequence[Literal["segment", "word"]] = ()
) -> dict[str, Any]:
    """Return the fields of OpenAI's `verbose_json` in addition to the text.

    Args:
        transcript: a `Transcript` of ed-models.
        task: "transcribe" or "translate".
        granularities: what has times; () = segments.
    """
    fields = {
        "task": task,
        "language": "english" if task == "translate" else language_name(transcript.language),
        "duration": transcript.duration,
    }
    if "word" in granularities:
        words = [word for segment in transcript.segments for word in segment.words or ()]
        fields["words"] = [
            {"word": word.text.strip(), "start": word.start, "end": word.end} for word in words
        ]
    if "segment" in granularities or not granularities:
        fields["segments"] = [_segment(segment) for segment in transcript.segments]
    return fields


def language_name(code: str | None) -> str:
    """Return the English name of a language, as OpenAI's API does."""
    if code is None:
        return "unknown"
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return LANGUAGES.get(code, code)


def _segment(segment: Segment) -> dict[str, Any]:
    times = {name: round(getattr(segment, name), 3) for name in ("start", "end")}
    fields = {**asdict(segment), **times, "tokens": list(segment.tokens)}
    return {name: fields[name] for name in fields if name not in ("token_times", "words")}


def subtitles(segments: Sequence[Segment], form: Literal["srt", "vtt"]) -> str:
    """Return segments as subtitles."""
    mark = "," if form == "srt" else "."
    blocks = ["WEBVTT"] if form == "vtt" else []
    for number, segment in enumerate(segments, 1):
        # An empty line ends a block, and `-->` separates its times.
        text = " ".join(segment.text.split()).replace("-->", "->")
        times = f"{clock(segment.start, mark)} --> {clock(segment.end, mark)}"
        blocks.append(f"{number}\n{times}\n{text}" if form == "srt" else f"{times}\n{text}")
    return "\n\n".join(blocks) + "\n\n" if blocks else ""


def clock(seconds: float, mark: str) -> str:
    """Return a time as `hours:minutes:seconds` and milliseconds."""
    whole_seconds, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, whole_seconds = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{whole_seconds:02}{mark}{milliseconds:03}"


class TextDeltas:
    """Returns the new text of each segment. All pieces together are the text of the transcript.

    Args:
        transcriber: the `Transcriber` of the segments.
    """

    def __init__(self, transcriber: Any) -> None:
        self._transcriber = transcriber
        self._joined = "timestamps" not in transcriber.options
        self._tokens: list[int] = []
        self._space = ""
        self._sent = ""

    def push(self, segment: Segment) -> str:
        """Return the text of a segment; empty while the text ends within a character."""
        if self._joined:  # a model whose segments are joined by spaces
            text = f" {segment.text.strip()}"
        else:
            self._tokens += self._transcriber.decoder.words(segment.tokens)
            text = self._transcriber.get_text(self._tokens)
            if text.endswith("\ufffd"):
                return ""
            self._tokens = []
        text = self._space + text
        text = text if self._sent else text.lstrip()
        new = text.rstrip()
        self._space = text[len(new) :]  # a transcript does not end with spaces
        self._sent += new
        return new

    def rest(self, text: str) -> str:
        """Return the part of the transcript that was not returned yet."""
        return text[len(self._sent) :] if text.startswith(self._sent) else ""
