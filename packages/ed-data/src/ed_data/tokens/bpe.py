"""Train a byte-level BPE tokenizer on one's own text, in a form that transformers loads."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ed_data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("ed_data")

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
_BYTES = 256

#: Role and text on lines of their own; an answer ends with the end-of-text token, and is marked
#: for the loss. Line ends stand alone in byte-level BPE, so a prompt is cut between tokens.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message['role'] + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nassistant:\\n' }}{% endif %}"
)


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    chat_template: str | None = CHAT_TEMPLATE,
    model_max_length: int | None = None,
    save_directory: str | os.PathLike[str] | None = None,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich 2016; bytes as in GPT-2).

    Every text can be encoded, and decoding gives it back exactly. A text begins with `<|bos|>`;
    `<|eos|>` is added by whoever knows that it ends. The same texts give the same tokenizer.

    Args:
        texts: the text to learn from.
        vocab_size: number of ids; at least 256 bytes and 3 special tokens. Little text may not
            fill it: then the tokenizer is smaller, and says so.
        min_frequency: how often a pair must occur to be merged.
        chat_template: a Jinja template, or None.
        model_max_length: the length that the tokenizer warns above.
        save_directory: where to save it, if anywhere.

    Raises:
        DataError: the vocabulary is too small, or there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [BOS, EOS, PAD]
    if vocab_size < _BYTES + len(special):
        raise DataError(
            f"vocab_size {vocab_size} is too small: the {_BYTES} bytes and {len(special)} special "
            f"tokens need {_BYTES + len(special)}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    seen = _Seen(texts)
    backend.train_from_iterator(seen, trainer)
    if not seen.characters:
        raise DataError("cannot train a tokenizer: there is no text")
    size = backend.get_vocab_size()
    if size < vocab_size:
        log.warning(
            "the text gave a vocabulary of %d, not %d: it has no more pairs that occur %d times",
            size,
            vocab_size,
            min_frequency,
        )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, backend.token_to_id(BOS))],
    )
    extra = {} if model_max_length is None else {"model_max_length": model_max_length}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        **extra,
    )
    tokenizer.chat_template = chat_template
    if save_directory is not None:
        tokenizer.save_pretrained(os.fspath(save_directory))
    return tokenizer


class _Seen:
    """Texts on their way to the trainer, counted."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text
