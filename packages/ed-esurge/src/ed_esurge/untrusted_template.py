"""The server's interface to the worker process that renders templates of requests.

An endless loop or a very long text in a template ends the child of one request, and not the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ed_esurge.children.messages import REFUSED
from ed_esurge.children.process import (
    ChildEndedError,
    ChildLimits,
    ChildMemoryError,
    JobGroup,
    WorkerProcess,
)
from ed_esurge.template_worker import MARKS, TEXT, TOO_LONG

#: Processor time of a conversation in seconds, and time of each byte of its messages.
CPU_SECONDS, CPU_PER_BYTE = 2.0, 5e-7
#: Elapsed time of a conversation in seconds.
WALL_SECONDS = 30.0
#: Memory of a conversation in bytes, and memory of each byte of its messages.
MEMORY, MEMORY_PER_BYTE = 2**28, 32


class UntrustedTemplateError(Exception):
    """A template of a request rejects the conversation, or exceeds a limit."""


class TooLongTextError(UntrustedTemplateError):
    """The rendered text is too long.

    Attributes:
        characters: length of the text.
    """

    def __init__(self, characters: int) -> None:
        super().__init__(f"the text has {characters} characters")
        self.characters = characters


class UntrustedTemplates(WorkerProcess):
    """Renders templates of requests in limited children of a worker process.

    Args:
        tokenizer: a tokenizer of `transformers`, whose special tokens the templates read.
    """

    def __init__(self, tokenizer: object) -> None:
        super().__init__("ed_esurge.template_worker")
        special: Mapping[str, Any] = getattr(tokenizer, "special_tokens_map", {})
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._tokens = {
            "special_tokens": {
                name: [*map(str, value)] if isinstance(value, list | tuple) else str(value)
                for name, value in special.items()
            },
            "added_tokens": [token.content for token in added.values() if token.special],
        }

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        most: int,
        group: JobGroup | None = None,
    ) -> tuple[str, re.Pattern[str]]:
        """Return the text of a conversation and the pattern of its marks.

        Args:
            template: Jinja text.
            options: options of `ChatTemplate.render`, which describes the result, as JSON.
            most: limit of the text in characters.
            group: the jobs that are cancelled together.

        Raises:
            UntrustedTemplateError: the template rejects the conversation, or exceeds a limit.
        """
        data = json.dumps([messages, options]).encode()
        size = len(data) + len(template)
        cpu, memory = CPU_SECONDS + CPU_PER_BYTE * size, MEMORY + MEMORY_PER_BYTE * size
        job = {"characters": most, **self._tokens}
        text, marks = bytearray(), b""
        try:
            limits = ChildLimits(cpu, memory, WALL_SECONDS)
            for kind, content in self.messages(data, {**job, "template": template}, limits, group):
                if kind == TOO_LONG:
                    raise TooLongTextError(int(content))
                if kind == REFUSED:
                    raise UntrustedTemplateError(content.decode("utf-8", "replace"))
                if kind == MARKS:
                    marks = content
                elif kind == TEXT:
                    text += content
        except ChildMemoryError:
            raise UntrustedTemplateError(
                f"the template needs more than {memory >> 20} MiB: write a shorter text"
            ) from None
        except ChildEndedError:
            raise UntrustedTemplateError(
                f"the template was not rendered within {cpu:.3g} s of processor time: remove its "
                "loops"
            ) from None
        return text.decode("utf-8", "surrogatepass"), re.compile(marks.decode())
