"""The images of tasks of lm-evaluation-harness: texts with `<image>` to prompts of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from ed_infra.errors import ConfigError

from ed_esurge.server.generation.images import ChatImages, ImageSource
from ed_esurge.server.http.errors import APIError

if TYPE_CHECKING:
    from ed_esurge.core.commands import EncoderInput
    from ed_esurge.engine import eSurge

#: The text that represents an image in the documents of a task.
_PLACEHOLDER = "<image>"


class TaskImages:
    """Reads the images of tasks for one engine.

    Args:
        names: names of the arrays that the model reads.
        processor: processor of the checkpoint.
    """

    def __init__(self, names: Sequence[str], processor: Any) -> None:
        self._images, self._processor = ChatImages(names, processor, ()), processor

    @classmethod
    def of(cls, engine: eSurge) -> Self | None:
        """Return the reader of an engine; None if its model reads no images."""
        processor = engine.processor
        if processor is None or "pixel_values" not in engine.input_names:
            return None
        return cls(engine.input_names, processor)

    @staticmethod
    def chat(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation in which images are parts of the messages."""
        messages = []
        for message in history:
            content = message["content"]
            if isinstance(content, str) and _PLACEHOLDER in content:
                first, *remaining_texts = content.split(_PLACEHOLDER)
                parts = [{"type": "text", "text": first}] if first else []
                for text in remaining_texts:
                    parts.append({"type": "image"})
                    parts += [{"type": "text", "text": text}] if text else []
                content = parts
            messages.append({**message, "content": content})
        return messages

    def prompt(
        self, text: str, images: Sequence[Any], encode: Callable[[str], list[int]]
    ) -> tuple[list[int], tuple[EncoderInput, ...]]:
        """Return the tokens of a text with its images, and the inputs of the encoder.

        Args:
            text: contains `<image>`, or the image token of the processor, once for each image.
            images: PIL images in order.
            encode: converts a text to tokens.

        Raises:
            ConfigError: the number of images is not that of their places in the text, or an image
                cannot be processed.
        """
        token: str = self._processor.image_token
        text = text.replace(_PLACEHOLDER, token)
        if (places := text.count(token)) != len(images):
            raise ConfigError(
                f"a document of the task has {len(images)} images, but its text has {places} "
                f"places for images ({_PLACEHOLDER!r} or {token!r}): correct doc_to_text or "
                "doc_to_image"
            )
        if not images:
            return encode(text), ()
        sources = [
            ImageSource(image, f"doc_to_image[{place}]") for place, image in enumerate(images)
        ]
        try:
            expanded, media = self._images.expand_placeholders(text, sources)
            tokens = encode(expanded)
            return tokens, self._images.build_encoder_inputs(tokens, media)
        except APIError as error:
            raise ConfigError(str(error)) from error
