"""Formats of transcripts: verbose JSON, and subtitles (SubRip, WebVTT)."""

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
