"""Conversations as tokens of trainer, engine and transformers. Each is encoded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from ed_elarge.certify.chats import CONVERSATIONS, TOOLS, SampleChat
from ed_elarge.certify.outcome import Failed, NotApplicable

T = TypeVar("T")


class Conversing(Protocol):
    """A model with a tokenizer and a chat template."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def template(self) -> Any: ...


class Encodings:
    """The tokens of conversations for one model."""

    def __init__(self, subject: Conversing) -> None:
        self._subject = subject
        self._known: dict[tuple[str, str], Any] = {}

    def cases(self) -> list[tuple[str, SampleChat, dict[str, Any]]]:
        """Return the conversations that the template renders, with its options.

        Raises:
            Failed: the template renders none of the conversations.
        """
        rendered_cases: list[tuple[str, SampleChat, dict[str, Any]]] = []
        for name, chat in CONVERSATIONS.items():
            try:
                self.encode_with_transformers(chat)
            except NotApplicable:
                raise
            except Exception:  # templates may raise any exception, e.g. for a system message
                continue
            rendered_cases.append((name, chat, {}))
        if not rendered_cases:
            raise Failed("the template renders none of the conversations")
        if self._subject.template.conversation.renders_tools:
            rendered_cases.append(("tools", CONVERSATIONS["one turn"], {"tools": TOOLS}))
        return rendered_cases

    def encode_with_transformers(self, chat: SampleChat, **options: object) -> list[int]:
        """Return the tokens that `apply_chat_template` returns."""

        def encode() -> list[int]:
            _ = self._subject.template  # without a template the check is not applicable
            arguments = {"tokenize": True, "return_dict": True, **options}
            output = self._subject.tokenizer.apply_chat_template(chat, **arguments)
            return list(output["input_ids"])

        return self._once("transformers", (chat, options), encode)

    def encode_with_engine(self, chat: SampleChat, **options: object) -> list[int]:
        """Return the prompt of the engine."""
        template = self._subject.template
        return self._once("engine", (chat, options), lambda: template.token_ids(chat, **options))

    def encode_with_trainer(
        self, chat: SampleChat, **options: object
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation and their loss mask, as the trainer reads them.

        Raises:
            Failed: the trainer cannot read the conversation.
            NotApplicable: the tokenizer has no end-of-text token.
        """

        def encode() -> tuple[list[int], list[int]]:
            from ed_data.errors import DataError
            from ed_data.tokens.chats import ChatEncoder
            from ed_data.tokens.items import DocumentField

            eos = self._subject.tokenizer.eos_token_id
            if eos is None:
                raise NotApplicable("the tokenizer has no end-of-text token")
            encoder = ChatEncoder(self._subject.tokenizer, eos, assistant_only_loss=True)
            item = DocumentField(chat, "the conversation", options)
            try:
                tokens = encoder.encode_chats([item])[0]
            except DataError as error:
                raise Failed(f"the trainer cannot read a conversation: {error}") from error
            return list(tokens.ids), list(tokens.mask or [])

        _ = self._subject.template
        return self._once("trainer", (chat, options), encode)

    def text(self, chat: SampleChat, **options: object) -> str:
        """Return the rendered text of a conversation."""

        def render() -> str:
            _ = self._subject.template
            arguments = {"tokenize": False, **options}
            return str(self._subject.tokenizer.apply_chat_template(chat, **arguments))

        return self._once("text", (chat, options), render)

    def _once(self, kind: str, inputs: object, compute: Callable[[], T]) -> T:
        key = kind, repr(inputs)
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]
