"""Options of the engine that samples for a training run. No jax."""

from __future__ import annotations

from typing import Any

from ed_esurge.config import EngineConfig


def add_rollout_defaults(
    config: EngineConfig, *, length: int, completions: int | None = None, benchmarks: bool = False
) -> EngineConfig:
    """Return options with the defaults of an engine for rollouts; options that are set stay.

    Programs compile at first use, and the engine prints nothing. The context has the length of a
    row, and the engine runs at most the completions of a generation at the same time, because
    pages for more would never be used.

    Args:
        config: options of the section `esurge`.
        length: tokens of a row.
        completions: completions of a generation; None = unknown.
        benchmarks: whether benchmarks use the engine; their prompts may exceed a row.
    """
    defaults: dict[str, Any] = {"compile_runner": False, "silent_mode": True}
    if not benchmarks:
        defaults["max_model_len"] = length
        if completions is not None:
            defaults["max_num_seqs"] = min(config.max_num_seqs, completions)
    return config.replace(**{k: v for k, v in defaults.items() if k not in config.model_fields_set})
