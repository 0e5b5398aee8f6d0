"""Train a byte-level BPE tokenizer that transformers can load."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ed_data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("ed_data")

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
_BYTES = 256

#: The role and the text are on separate lines. An answer ends with the end-of-text token and is
#: marked for the loss. Byte-level BPE does not merge line ends, so a prompt ends between tokens.
_CHAT_TEMPLATE = (
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
    chat_template: str | None = _CHAT_TEMPLATE,
    mask_token: bool = False,
    special_tokens: Sequence[str] = (),
    model_max_length: int | None = None,
    save_directory: str | os.PathLike[str] | None = None,
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer (Sennrich 2016; bytes as in GPT-2).

    Every text can be encoded and decoded without loss. Encoding adds `<|bos|>` at the beginning;
    the caller adds `<|eos|>` at the end of a document. The same texts produce the same tokenizer.

    Args:
        texts: the training texts.
        vocab_size: number of ids; at least 256 bytes and the special tokens. With little text the
            tokenizer is smaller and logs a warning.
        min_frequency: minimum number of occurrences of a merged pair.
        chat_template: a Jinja template, or None.
        mask_token: add `<|mask|>`, for masked language models.
        special_tokens: further special tokens, such as the sentinels `<extra_id_0>`, … of T5.
        model_max_length: number of tokens above which the tokenizer logs a warning.
        save_directory: folder for the tokenizer, or None.

    Raises:
        DataError: the vocabulary is too small, or there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [BOS, EOS, PAD, *([MASK] if mask_token else []), *special_tokens]
    if vocab_size < _BYTES + len(special):
        raise DataError(
            f"vocab_size={vocab_size} is too small: {_BYTES} bytes and {len(special)} special "
            f"tokens require at least {_BYTES + len(special)}"
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
        raise DataError("cannot train a tokenizer: the texts are empty")
    size = backend.get_vocab_size()
    if size < vocab_size:
        log.warning(
            "the vocabulary has %d ids instead of %d: no other pair occurs at least %d times",
            size,
            vocab_size,
            min_frequency,
        )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, backend.token_to_id(BOS))],
    )
    extra: dict[str, int | str] = {"mask_token": MASK} if mask_token else {}
    if model_max_length is not None:
        extra["model_max_length"] = model_max_length
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
    """Counts the characters of the texts that the trainer reads."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.characters += len(text)
            yield text
