"""The processor of audio-language models for environments without torch.

`VoxtralProcessor` of transformers requires torch, although its feature extractor and its tokenizer
do not. The files of a checkpoint are those of the two parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import FeatureExtractionMixin, PreTrainedTokenizerBase


class AudioTextProcessor:
    """A feature extractor and a tokenizer, whose chat template writes a token for a recording."""

    def __init__(
        self, feature_extractor: FeatureExtractionMixin, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.feature_extractor, self.tokenizer = feature_extractor, tokenizer

    @property
    def chat_template(self) -> object:
        """The template of the tokenizer."""
        return self.tokenizer.chat_template

    @chat_template.setter
    def chat_template(self, text: str) -> None:
        self.tokenizer.chat_template = text

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the files of both parts, as `transformers` reads them."""
        self.feature_extractor.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)
