"""From what a client sent to token ids that fit: encoding, chat templates, context checks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from ed_esurge.server.errors import APIError
from ed_esurge.server.protocol import ChatRequest, Message

# Characters beyond which tokenizing would hold up the streams of other clients noticeably
# (about 10 ms), so that it goes to a thread.
LONG_TEXT = 20_000


class Prompts:
    """Encodes prompts for one model.

    Args:
        tokenizer: Hugging Face tokenizer of the served model.
        max_model_len: most tokens of a prompt and its completion together.
        vocab_size: token ids that the model knows are below this.
        chat_template: Jinja text that replaces the tokenizer's own template.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_model_len: int,
        vocab_size: int,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.chat_template = chat_template

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Raises:
            APIError: 400, when it is not text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise APIError(
                f"the text is not valid Unicode: {error.reason} (character {error.start})"
            ) from error
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def check_tokens(self, tokens: Sequence[int], *, param: str) -> None:
        """Refuse ids that the model has no embedding for.

        Raises:
            APIError: 400, naming the first such id.
        """
        if max(tokens) >= self.vocab_size or min(tokens) < 0:
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise APIError(
                f"token id {wrong} is outside the vocabulary of {self.vocab_size}",
                param=param,
                code="invalid_value",
            )

    def room(self, length: int, wanted: int | None, *, param: str, default: int | None) -> int:
        """How many tokens may be generated after a prompt.

        Args:
            length: tokens of the prompt.
            wanted: what the client asked for, if it did.
            param: the field that holds the prompt, for the error.
            default: what to generate when nothing was asked for; None: as much as fits.

        Raises:
            APIError: 400 `context_length_exceeded`.
        """
        room = self.max_model_len - length
        if length == 0:
            raise APIError("the prompt is empty: it has no tokens", param=param)
        if room < (1 if wanted is None else wanted):
            asked = length + (wanted or 0)
            ways = "shorten it" if room < 1 else f"shorten it, or ask for at most {room} tokens"
            raise APIError(
                f"this model's maximum context length is {self.max_model_len} tokens; you asked "
                f"for {asked} ({length} in the {param}, {wanted or 0} in the completion): {ways}",
                param=param,
                code="context_length_exceeded",
            )
        if wanted is not None:
            return wanted
        return room if default is None else min(default, room)

    async def chat(self, request: ChatRequest) -> list[int]:
        """Token ids of a conversation, through the chat template."""
        text = self.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )
        # The template writes the special tokens itself.
        return await self.encode(text, add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The text that the chat template makes of a conversation.

        Raises:
            APIError: 400, when there is no template or it refuses the conversation.
        """
        if not (self.chat_template or getattr(self.tokenizer, "chat_template", None)):
            raise APIError(
                "this model has no chat template, so it cannot take messages: use "
                "/v1/completions, or start the server with chat_template=",
                code="no_chat_template",
            )
        # Only what a template may read: not the arguments that would change what comes back.
        variables = variables or {}
        taken = sorted(variables.keys() & _RESERVED)
        if taken:
            raise APIError(
                f"{taken[0]!r} is not a variable of the template; it has its own request field",
                param="chat_template_kwargs",
            )
        try:
            return self.tokenizer.apply_chat_template(
                [message.for_template() for message in messages],
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise APIError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error


_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
