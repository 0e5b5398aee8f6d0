"""Content blocks of Anthropic's API, and their conversion to parts of a chat message."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from ed_esurge.server.generation.content_parts import ImagePart, ImageURL
from ed_esurge.server.generation.requests import MAX_PARTS
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import History, check_part_types, few, reject_field

#: First words of system blocks that a client changes with every request, such as Claude Code's
#: attribution. Such a block would end the cached prefix of the conversation, so it is omitted.
#: An application may append further texts.
CHANGING_BLOCKS = ["x-anthropic-billing-header:"]

#: Blocks that have no text for the model: encrypted thoughts, and the work of the tools of
#: Anthropic's servers.
SkippedType = Literal[
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "container_upload",
    "tool_reference",
    "tool_addition",
    "tool_removal",
    "mcp_tool_listing",
    "fallback",
]


class ContentBlock(History):
    """Base of the blocks. `cache_control` has no effect."""

    cache_control: dict[str, Any] | None = None


class SkippedBlock(ContentBlock):
    """A block without text for the model."""

    type: SkippedType


class TextBlock(ContentBlock):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]


class CompactionBlock(ContentBlock):
    """The summary of an earlier part of the conversation."""

    type: Literal["compaction"]
    content: str | None = None


class ToolUse(ContentBlock):
    """A call in a message of the assistant."""

    type: Literal["tool_use", "mcp_tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the call of a chat message."""
        arguments = json.dumps(self.input, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Thinking(ContentBlock):
    """Thoughts of the assistant in the conversation."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class Base64Source(History):
    """An image as base64 text."""

    type: Literal["base64"]
    media_type: Annotated[str, Field(max_length=128)]
    data: str

    @property
    def address(self) -> str:
        """The `data:` URL of the image."""
        return f"data:{self.media_type};base64,{self.data}"


class URLSource(History):
    """The address of an image."""

    type: Literal["url"]
    url: str

    @property
    def address(self) -> str:
        """The address of the image."""
        return self.url


class ImageBlock(ContentBlock):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]

    def for_chat(self, field: str, *, optional: bool = False) -> ImagePart:
        """Return the part of a chat message.

        Args:
            field: the field of the block in the request.
            optional: see `ImagePart.at`.
        """
        url = ImageURL(url=self.source.address)
        part = ImagePart(type="image_url", image_url=url)
        return part.at(field, "source", optional=optional)


class PlainTextSource(History):
    """The text of a document."""

    type: Literal["text"]
    data: str
    media_type: str | None = None


class BlocksSource(History):
    """A document of text and images."""

    type: Literal["content"]
    content: Annotated[
        str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
        check_part_types("text", "image"),
        few(MAX_PARTS),
    ]


class StoredFileSource(History):
    """A document that is no text, which this server cannot read."""

    type: Literal["base64", "url", "file"]
    data: Annotated[None, reject_field("PDF documents; send the text of the document")] = None
    url: Annotated[None, reject_field("documents of an address; send their text")] = None
    file_id: Annotated[None, reject_field("documents of a file; send their text")] = None


class DocumentBlock(ContentBlock):
    """A document in a message of the user."""

    type: Literal["document"]
    source: Annotated[
        PlainTextSource | BlocksSource | StoredFileSource, Field(discriminator="type")
    ]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None

    def for_chat(self, field: str, *, optional: bool = False) -> list[dict[str, Any] | ImagePart]:
        """Return the parts of a chat message; see `ImageBlock.for_chat`."""
        head = [text for text in (self.title, self.context) if text]
        source = self.source
        body: list[dict[str, Any] | ImagePart] = []
        if isinstance(source, PlainTextSource):
            body = [write_text_block(source.data)]
        elif isinstance(source, BlocksSource) and isinstance(source.content, str):
            body = [write_text_block(source.content)]
        elif isinstance(source, BlocksSource):
            for place, block in enumerate(source.content):
                if isinstance(block, ImageBlock):
                    at = f"{field}.source.content[{place}]"
                    body.append(block.for_chat(at, optional=optional))
                elif isinstance(block, TextBlock):
                    body.append(write_text_block(block.text))
        else:
            raise InvalidField("has no content: send a source of type text", f"{field}.source")
        return [*(write_text_block(f"{text}\n") for text in head), *body, write_text_block("\n")]


class SearchResult(ContentBlock):
    """A result of a search by the client."""

    type: Literal["search_result"]
    title: str | None = None
    source: str | None = None
    content: Annotated[TextBlocks, few(MAX_PARTS)] = Field(default_factory=list)

    def for_chat(self) -> dict[str, Any]:
        """Return the text part of a chat message."""
        texts = [self.title, self.source, *(block.text for block in self.content)]
        return write_text_block("\n".join(text for text in texts if text) + "\n")


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResult | SkippedBlock,
    Field(discriminator="type"),
]
_READABLE = ("text", "image", "document", "search_result")


class ToolResult(ContentBlock):
    """The result of a call in a message of the user."""

    type: Literal["tool_result", "mcp_tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: Annotated[
        str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None,
        check_part_types(*_READABLE, *get_args(SkippedType)),
        few(MAX_PARTS),
    ] = None
    is_error: bool | None = None

    def for_chat(self, field: str) -> tuple[dict[str, Any], list[ImagePart]]:
        """Return the result as a chat message, and its images.

        Templates render images only in messages of the user. A model that reads only text receives
        a note instead of the image, because the client cannot take back what its tool has read.

        Args:
            field: the field of the block in the request.
        """
        blocks = [] if self.content is None else self.content
        parts = (
            [write_text_block(blocks)]
            if isinstance(blocks, str)
            else convert_blocks(blocks, f"{field}.content", optional=True)
        )
        text = "".join(part["text"] for part in parts if isinstance(part, dict))
        if self.is_error:  # templates have no field for errors
            text = f"Error: {text}"
        message = {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}
        return message, [part for part in parts if isinstance(part, ImagePart)]


AnyBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResult
    | ToolUse
    | ToolResult
    | Thinking
    | CompactionBlock
    | SkippedBlock,
    Field(discriminator="type"),
]
ContentBlocks = Annotated[
    str | Annotated[list[AnyBlock], Field(fail_fast=True)],
    check_part_types(
        *_READABLE,
        *("tool_use", "mcp_tool_use", "tool_result", "mcp_tool_result", "thinking", "compaction"),
        *get_args(SkippedType),
    ),
    few(MAX_PARTS),
]


def write_text_block(text: str) -> dict[str, Any]:
    """Return a text part of a chat message."""
    return {"type": "text", "text": text}


def convert_blocks(
    blocks: Iterable[Any], field: str, *, optional: bool = False
) -> list[dict[str, Any] | ImagePart]:
    """Return the parts of a chat message for the readable blocks; the others are omitted.

    Args:
        blocks: blocks of a message or of a result.
        field: the field of the blocks in the request.
        optional: see `ImageBlock.for_chat`.
    """
    parts: list[dict[str, Any] | ImagePart] = []
    for place, block in enumerate(blocks):
        match block:
            case TextBlock():
                parts.append(write_text_block(block.text))
            case CompactionBlock():
                parts.append(write_text_block(block.content or ""))
            case ImageBlock():
                parts.append(block.for_chat(f"{field}[{place}]", optional=optional))
            case DocumentBlock():
                parts += block.for_chat(f"{field}[{place}]", optional=optional)
            case SearchResult():
                parts.append(block.for_chat())
    return parts


def omits_block(block: TextBlock) -> bool:
    """Return whether a system block is one of `CHANGING_BLOCKS`."""
    return block.text.lstrip().startswith(tuple(CHANGING_BLOCKS))
