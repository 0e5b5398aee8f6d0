"""Conversation with a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends the conversation.

/reset clears the conversation, /undo removes the last question, /system TEXT sets the system
prompt. Without a chat template, the model continues each line as a prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ed_infra.errors import EasyDeLError

from ed_esurge.command.load import add_model_arguments, create_engine
from ed_esurge.sampling import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the conversation, the engine and the model."""
    add_model_arguments(parser, answers_early=True)
    group = parser.add_argument_group("chat")
    group.add_argument("--system", help="the system prompt")
    group.add_argument("--temperature", type=float, default=0.7, help="default: %(default)s")
    group.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    group.add_argument("--max-tokens", type=int, default=512, help="default: %(default)s")


def run(values: argparse.Namespace) -> int:
    """Answer messages until the input ends."""
    values.max_num_seqs = values.max_num_seqs or "1"
    params = SamplingParams(
        temperature=values.temperature,
        top_p=values.top_p,
        max_tokens=values.max_tokens,
        seed=None,
    )
    talk = Conversation(create_engine(values), params, values.system)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        try:
            talk.take(line.strip())
        except EasyDeLError as error:
            print(f"error: {error}", file=sys.stderr)


class Conversation:
    """The messages of a conversation, and the engine that answers.

    Args:
        engine: an `eSurge` with a tokenizer.
        params: sampling options of the answers.
        system: the system prompt.
    """

    def __init__(self, engine: Any, params: SamplingParams, system: str | None = None) -> None:
        from ed_esurge.template import ChatTemplate

        self._engine, self._params, self.system = engine, params, system
        self.messages: list[dict[str, str]] = []
        has_template = getattr(engine.tokenizer, "chat_template", None) is not None
        self._template = ChatTemplate(engine.tokenizer) if has_template else None

    def take(self, line: str) -> None:
        """Process a line: a command, or a message to answer."""
        command, _, argument = line.partition(" ")
        if command == "/reset":
            self.messages.clear()
        elif command == "/undo":
            del self.messages[-2:]
        elif command == "/system":
            self.system = argument or None
        elif command.startswith("/"):
            print(f"no such command: {command} (/reset, /undo, /system TEXT)", file=sys.stderr)
        elif line:
            self.answer(line)

    def answer(self, text: str) -> None:
        """Print an answer while it is generated.

        The text of a stopped answer is kept. An error does not change the conversation.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        said = ""
        try:
            for delta in self._engine.stream(self._prompt(messages, text), self._params):
                new = delta.outputs[0].text
                said += new
                print(new, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        finally:
            print(flush=True)
        self.messages = [*messages, {"role": "assistant", "content": said}]

    def _prompt(self, messages: Sequence[dict[str, str]], text: str) -> str | list[int]:
        if self._template is None:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._template.token_ids([*system, *messages])
