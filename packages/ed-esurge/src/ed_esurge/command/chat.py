"""Conversation with a model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ed_infra.errors import EasyDeLError
from ed_infra.options import Options

from ed_esurge.command.flags import Flags
from ed_esurge.command.load import ModelFlags, ModelPath, create_engine
from ed_esurge.config import EngineConfig

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge
    from ed_esurge.sampling import SamplingParams


class ChatOptions(Options):
    """Options of a conversation."""

    system: str | None = None
    """The system prompt."""
    temperature: float = 0.7
    """Sampling temperature; 0: the most probable tokens."""
    top_p: float = 1.0
    """Share of the probability from which tokens are sampled."""
    max_tokens: int = 512
    """Maximum number of tokens of an answer."""


def _get_engine_defaults(values: Mapping[str, Any]) -> Mapping[str, object]:
    return {"compile_in_background": True, "max_num_seqs": 1}


def chat(
    model: ModelPath,
    loading: ModelFlags,
    engine: Annotated[
        EngineConfig, Flags("engine", has_words=False, defaults=_get_engine_defaults)
    ],
    options: Annotated[ChatOptions, Flags("chat")],
) -> int:
    """Talk with a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends the conversation.

    /reset clears the conversation, /undo removes the last question, /system TEXT sets the system
    prompt. Without a chat template, the model continues each line as a prompt.
    """
    return talk(create_engine(loading.replace(model=model, engine=engine)), options)


def talk(engine: eSurge, options: ChatOptions) -> int:
    """Answer the lines of standard input until its end, and return the exit code."""
    from ed_esurge.sampling import SamplingParams

    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        max_tokens=options.max_tokens,
        seed=None,
    )
    conversation = Conversation(engine, params, options.system)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        try:
            conversation.take(line.strip())
        except EasyDeLError as error:
            print(f"error: {error}", file=sys.stderr)


class Conversation:
    """The messages of a conversation, and the engine that answers.

    Args:
        engine: an `eSurge` with a tokenizer.
        params: sampling options of the answers.
        system: the system prompt.
    """

    def __init__(self, engine: eSurge, params: SamplingParams, system: str | None = None) -> None:
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
