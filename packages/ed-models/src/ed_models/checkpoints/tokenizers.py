"""The tokenizer of a checkpoint, as `transformers` loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ed_infra.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or a hub repository.

    Args:
        name: the directory or repository.
        revision: branch, tag or commit of a repository.
        trust_remote_code: let the repository run its own Python code.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"no tokenizer could be loaded from {name!r}: {reason}") from error
