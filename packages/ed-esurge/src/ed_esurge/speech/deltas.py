"""The text of a transcript in the pieces of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ed_models.speech import Segment


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
