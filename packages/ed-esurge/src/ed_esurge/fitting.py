"""Fitting of prompts and `max_tokens` to the context."""

from __future__ import annotations

from ed_infra.errors import ConfigError

from ed_esurge.config import EngineConfig


def fit(
    prompt: list[int], max_tokens: int | None, config: EngineConfig, max_model_len: int
) -> tuple[list[int], int]:
    """Truncate the prompt and reduce `max_tokens` according to the options, so that both fit.

    Args:
        prompt: token ids.
        max_tokens: requested number of tokens; None is the free part of the context, 0 needs no
            room after the prompt.
        config: the engine's options.
        max_model_len: maximum length of prompt plus completion.

    Returns:
        the prompt to use, and the number of tokens to generate: at least 1, or 0 if requested.

    Raises:
        ConfigError: the request does not fit, and the options forbid the required change.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens: give at least one")
    room = 0 if max_tokens == 0 else max(1, config.reserve_tokens or 1)
    may_cut = config.auto_truncate_prompt and not config.strict_context
    if may_cut and not config.prefer_preserve_prompt and max_tokens is not None:
        room = max(room, min(max_tokens, max_model_len - 1))
    longest = max_model_len - room
    least = 1 if max_tokens is None else max_tokens
    if len(prompt) > longest and len(prompt) + least > max_model_len:
        if not may_cut:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, but max_model_len {max_model_len} leaves "
                f"{longest} beside {room} to generate: shorten the prompt, or set "
                "auto_truncate_prompt (without strict_context)"
            )
        prompt = truncate(prompt, longest, config.truncate_mode)
    free = max_model_len - len(prompt)
    if max_tokens is None:
        return prompt, free
    if max_tokens > free:
        if config.strict_context or not config.auto_cap_new_tokens:
            raise ConfigError(
                f"max_tokens {max_tokens} after a prompt of {len(prompt)} tokens exceeds "
                f"max_model_len {max_model_len}: ask for at most {free}, or allow "
                "auto_cap_new_tokens (and not strict_context)"
            )
        max_tokens = free
    return prompt, max_tokens


def truncate(prompt: list[int], length: int, mode: str) -> list[int]:
    """Remove the left, the right or the middle part of a prompt."""
    if mode == "left":
        return prompt[-length:]
    if mode == "right":
        return prompt[:length]
    head = length - length // 2
    return prompt[:head] + prompt[len(prompt) - length // 2 :]
