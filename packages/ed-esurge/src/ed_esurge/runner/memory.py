"""How many pages fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from ed_infra.errors import ConfigError

from ed_esurge.config import EngineConfig

GIB = 2**30


def page_bytes(model: Any, page_size: int) -> int:
    """Bytes of one page on the device that holds most of it, over all layers."""
    leaves = jax.tree.leaves(model.init_paged_cache(1, page_size))
    return sum(max(shard.data.nbytes for shard in leaf.addressable_shards) for leaf in leaves)


def pool_size(
    model: Any,
    config: EngineConfig,
    *,
    max_model_len: int,
    max_num_seqs: int,
    workspace: Callable[[], int],
) -> int:
    """Pages of the pool.

    On an accelerator: what `hbm_utilization` of its memory leaves beside everything that is there
    already and the largest step's workspace. On a CPU: `cpu_cache_gib`. Never more than
    `max_num_seqs` sequences of `max_model_len` can use, never less than one such sequence.

    Args:
        max_model_len, max_num_seqs: the effective limits.
        workspace: bytes that a step needs for a moment; asked for on accelerators only.

    Raises:
        ConfigError: not even one sequence fits.
    """
    longest = -(-max_model_len // config.page_size)
    useful = longest * max_num_seqs
    if config.num_pages is not None:
        if config.num_pages < longest:
            raise ConfigError(
                f"num_pages {config.num_pages} of {config.page_size} tokens cannot hold one "
                f"sequence of max_model_len {max_model_len}: give at least {longest}"
            )
        return config.num_pages
    size = page_bytes(model, config.page_size)
    memory = accelerator_memory(model)
    if memory is None:
        return max(longest, min(useful, int(config.cpu_cache_gib * GIB) // size))
    limit, used = memory
    free = int(limit * config.hbm_utilization) - used - workspace()
    if free < longest * size:
        raise ConfigError(
            f"hbm_utilization {config.hbm_utilization} of {limit / GIB:.1f} GiB leaves "
            f"{max(free, 0) / GIB:.2f} GiB for pages, but one sequence of max_model_len "
            f"{max_model_len} takes {longest * size / GIB:.2f} GiB: lower max_model_len or "
            "max_num_batched_tokens, or raise hbm_utilization"
        )
    return min(useful, free // size)


def accelerator_memory(model: Any) -> tuple[int, int] | None:
    """`(limit, in use)` in bytes of the fullest device of the model; None for a CPU."""
    found = []
    for device in model.mesh.local_devices:
        stats = device.memory_stats() if device.platform != "cpu" else None
        if stats is None or "bytes_limit" not in stats:
            return None
        found.append((stats["bytes_limit"], stats["bytes_in_use"]))
    return min(found, key=lambda pair: pair[0] - pair[1])
