"""Option types for chats: chat templates, and prompts that are conversations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from ed_infra.errors import ConfigError

#: Characters that mark Jinja text instead of a file name; vLLM uses the same rule.
_OF_JINJA = "{}\n"
#: Published templates that a name selects, for models without a template.
NAMED_TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}


def read_chat_template(value: str) -> str:
    """Return the text of a chat template.

    Args:
        value: A name of `NAMED_TEMPLATES`, the path of a file, relative to the working directory,
            or the Jinja text itself.

    Raises:
        ConfigError: The value is not Jinja text, and no such file can be read.
    """
    if value in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[value]
    if any(mark in value for mark in _OF_JINJA):
        return value
    try:
        return Path(value).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"chat_template {value!r} cannot be read ({reason}): set the path of a file with a "
            "Jinja template, the text of the template, or a name "
            f"({', '.join(NAMED_TEMPLATES)})"
        ) from error


def _message(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("role"), str):
        raise ValueError("a message needs a role: {role: user, content: TEXT}")
    if not isinstance(value.get("content"), str | list | None):
        raise ValueError(
            f"the content of a message is {value['content']!r}: write a text, or a list of parts"
        )
    return value


def _kind(value: object) -> str:
    return "text" if isinstance(value, str) else "chat"


def _one_or_more(value: object) -> object:
    """Convert one prompt, a text or a list of messages, to a tuple."""
    chat = isinstance(value, (list, tuple)) and value and all(isinstance(m, Mapping) for m in value)
    return (value,) if chat or isinstance(value, str) else value


CheckedMessage = Annotated[dict[str, Any], AfterValidator(_message)]
Chat = Annotated[tuple[CheckedMessage, ...], Field(min_length=1)]
#: A text that the model continues, or a conversation that the model answers.
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[Chat, Tag("chat")],
    Discriminator(_kind),
]
#: Prompts, or one prompt alone.
CheckedPrompts = Annotated[tuple[Prompt, ...], BeforeValidator(_one_or_more)]
