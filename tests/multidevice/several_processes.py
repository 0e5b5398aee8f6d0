"""Compute values in one or several processes for `test_multidevice_processes`.

Arguments: a folder and the sizes of the mesh axes. Process 0 writes `<folder>/values.npz`, and each
process writes `<folder>/messages_<process>.txt`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from ed_infra import distributed
from ed_infra.errors import EasyDeLError
from ed_infra.logging import get_logger, once
from ed_infra.sharding import placement
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from tests.multidevice import llama_case as case


def whole(tree: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the arrays on the host, on every process."""
    everywhere = NamedSharding(next(iter(tree.values())).sharding.mesh, PartitionSpec())
    gathered = jax.jit(lambda x: x, out_shardings=everywhere)(tree)
    return {name: np.asarray(array) for name, array in gathered.items()}


def named(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model))
    return {case.leaf_name(path): variable.get_value() for path, variable in flat}


def on_mesh(dims: case.Dims) -> dict[str, np.ndarray]:
    """Create, shard and gather a model, and compute its forward pass and gradient."""
    config = case.config(dims).seal()
    created = case.LlamaForCausalLM.create(config, seed=1)
    gathered = created.gather_model()
    result = {f"created {name}": np.asarray(array) for name, array in named(gathered).items()}
    # A description on the host, equal on all processes, is placed on the devices again.
    graphdef, state = nnx.split(gathered)
    again = nnx.merge(graphdef, jax.tree.map(np.asarray, state)).shard_model()
    for name, array in named(again).items():
        assert array.sharding == named(created)[name].sharding, name
    result |= {f"sharded {name}": array for name, array in whole(named(again)).items()}

    where = case.rows_sharding(config)
    batch = case.batch()
    rows = placement.local_rows(where, case.B)
    own = {name: array[rows] for name, array in batch.items()}
    from_own_rows = placement.make_global(own, where, rows=case.B)
    from_all_rows = placement.make_global(batch, where)
    for name, array in whole(from_own_rows).items():
        np.testing.assert_array_equal(array, batch[name])
        assert from_own_rows[name].sharding == from_all_rows[name].sharding
    placed = case.Placed(again, from_own_rows)
    result |= whole({"loss": placed.loss, "logits": placed.logits})
    result |= {f"gradient {name}": array for name, array in whole(placed.gradients).items()}
    return result


def main(folder: Path, dims: case.Dims) -> None:
    process = os.environ["JAX_PROCESS_ID"]
    messages = logging.FileHandler(folder / f"messages_{process}.txt")
    logging.getLogger("easydel").addHandler(messages)
    logging.getLogger("easydel").setLevel(logging.INFO)
    assert distributed.initialize() and jax.device_count() == 8
    distributed.barrier("start")
    mine = {"process": np.int32(jax.process_index() + 7), "line": np.full(3, jax.process_index())}
    assert distributed.broadcast(mine)["process"] == 7
    assert distributed.broadcast(mine)["line"].tolist() == [0, 0, 0]
    for message in (b"", "plan: å".encode()):
        assert distributed.broadcast_bytes(message if distributed.is_main() else None) == message
    assert distributed.gather_bytes(b"xyz"[: 3 * jax.process_index()]) == [b"", b"xyz"]
    assert distributed.from_main(jax.process_index) == 0
    kind = ZeroDivisionError if distributed.is_main() else EasyDeLError
    with pytest.raises(kind, match="integer division"):
        distributed.from_main(lambda: 1 // jax.process_index())
    once(get_logger("ed_infra.event"), "an event of the whole run")
    get_logger("ed_infra.event").error("an error of process %d", jax.process_index())

    values = on_mesh(dims)
    if distributed.is_main():
        np.savez(folder / "values.npz", **values)
    distributed.barrier("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(int(n) for n in sys.argv[2:]))  # type: ignore[arg-type]
