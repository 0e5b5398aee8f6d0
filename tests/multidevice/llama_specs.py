"""The golden table of partition specs: each parameter and activation of a Llama on each mesh.

    uv run python -m tests.multidevice.llama_specs      rewrite the table

The meshes are abstract, so the command needs no devices.
"""

from __future__ import annotations

from pathlib import Path

from ed_infra.sharding import placement
from ed_infra.sharding.axes import AXIS_NAMES
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from tests.multidevice import llama_case as case

FILE = Path(__file__).with_name("llama_specs.txt")

#: Activations: name -> (mode, logical axes, shape). There are 4 key heads, fewer than devices.
ACTIVATIONS = {
    "tokens": ("train", ("batch", "sequence"), (case.B, case.S)),
    "stream": ("train", ("batch", "sequence", "hidden"), (case.B, case.S, 64)),
    "query": ("train", ("batch", "sequence", "heads", "head_dim"), (case.B, case.S, 8, 8)),
    "key": ("train", ("batch", "key_sequence", "kv_heads", None), (case.B, case.S, 4, 8)),
    "logits": ("train", ("batch", "sequence", "vocab"), (case.B, case.S, 252)),
    "decode tokens": ("decode", ("batch", "sequence"), (case.B, 1)),
    "decode cache": ("decode", ("batch", "kv_heads", None, None), (case.B, 4, 32, 8)),
}


def shown(spec: PartitionSpec) -> str:
    """Return a spec as in the table: `fsdp,tp`; `-` = replicated; `dp+fsdp` = over both."""
    parts = ["+".join((e,) if isinstance(e, str) else e or ("-",)) for e in spec]
    return ",".join(parts) or "-"


def table() -> str:
    """Return the table with a row for each mesh and a column for each parameter or activation."""
    config = case.config(case.ONE)
    state = nnx.state(case.abstract(config))
    names = [case.leaf_name(path) for path, _ in nnx.to_flat_state(state)]
    rows = [["/".join(AXIS_NAMES), *names, *ACTIVATIONS]]
    for dims in case.ALL:
        mesh = AbstractMesh(dims, AXIS_NAMES)
        specs = [spec for _, spec in nnx.to_flat_state(placement.specs(state, config, mesh))]
        resolve = config.partition_manager.resolve
        specs += [resolve(axes, mode, shape, mesh) for mode, axes, shape in ACTIVATIONS.values()]
        rows.append(["/".join(map(str, dims)), *map(shown, specs)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    return "".join(line.rstrip() + "\n" for line in lines)


def recorded(dims: case.Dims) -> dict[str, str]:
    """Parse a row of the file: name -> spec."""
    header, *rows = (line.split("  ") for line in FILE.read_text(encoding="utf-8").splitlines())
    cells = [[cell.strip() for cell in row if cell.strip()] for row in (header, *rows)]
    wanted = "/".join(map(str, dims))
    return next(dict(zip(cells[0], row, strict=True)) for row in cells[1:] if row[0] == wanted)


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
