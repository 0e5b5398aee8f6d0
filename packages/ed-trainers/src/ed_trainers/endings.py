"""Where a text that a model wrote ends."""

from __future__ import annotations

from ed_models.protocol import LanguageModel


def until_end(answer: list[int], model: LanguageModel) -> list[int]:
    """Return an answer up to its end-of-sequence token, that token included.

    Args:
        answer: ids that the model generated.
        model: its configuration says which tokens end a text.
    """
    ends = model.config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    at = next((i for i, token in enumerate(answer) if token in ends), len(answer) - 1)
    return answer[: at + 1]
