"""Headers of messages in the Harmony format of gpt-oss.

A reply is a sequence of messages: a header, `<|message|>`, a text and an end marker. The header
names the channel, the recipient of a call, and the type of the text, in several orders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MESSAGE = "<|message|>"
STARTS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = r"to=(?P<{}>[^\s<]+)"
_HEADER = re.compile(
    rf"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:{_RECIPIENT.format('first')})?\s*(?:<\|channel\|>)?"
    rf"\s*(?P<channel>analysis|commentary|final)?\s*(?:{_RECIPIENT.format('second')})?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
PEOPLE = ("assistant", "user")


@dataclass(frozen=True, slots=True)
class Header:
    """A header.

    Attributes:
        channel: name of the channel; "" without one.
        recipient: recipient of a call; "" for a message to the user.
    """

    channel: str
    recipient: str

    @property
    def function(self) -> str:
        """Name of the called function."""
        return self.recipient.removeprefix("functions.")


def parse_header(text: str) -> Header | None:
    """Return the header in the text before `<|message|>`; None if the text is no header."""
    hit = _HEADER.fullmatch(text)
    if hit is None:  # a header that the model began again
        first, marker, last = text.rpartition(STARTS[1])
        begun = _HEADER.fullmatch(first)
        hit = _HEADER.fullmatch(marker + last) if begun is not None else None
    if hit is None:
        return None
    recipient = hit["first"] or hit["second"] or ""
    return Header(hit["channel"] or "", "" if recipient in PEOPLE else recipient)
