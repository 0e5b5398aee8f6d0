"""The sharding rules that follow from a configuration alone, by the model registered for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flax import nnx
from jax.sharding import PartitionSpec

from ed_infra import registry
from ed_infra.sharding import partition_rules

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig


def model_rules(
    config: EasyDeLBaseConfig, fully_sharded: bool = True
) -> tuple[tuple[str, PartitionSpec], ...] | None:
    """Return the `partition_rules` of the model that is registered for a configuration.

    Args:
        config: of a registered model type; None is returned for others.
        fully_sharded: False leaves the fully-sharded axis out, as for serving with tensor
            parallelism alone.
    """
    tasks = registry.tasks_of(config.model_type)
    if not tasks:
        return None
    cls = registry.get_module(tasks[0], config.model_type)
    own = config.replace()  # a module seals the configuration that it is given
    rules = partition_rules(nnx.eval_shape(lambda: cls(own, rngs=nnx.Rngs(0))), own)
    if fully_sharded:
        return rules
    axis = config.partition_axis.fully_sharded_data_parallel_axis

    def without(entry: Any) -> Any:
        names = [n for n in ((entry,) if isinstance(entry, str) else entry or ()) if n != axis]
        return names[0] if len(names) == 1 else tuple(names) or None

    return tuple((name, PartitionSpec(*map(without, spec))) for name, spec in rules)
