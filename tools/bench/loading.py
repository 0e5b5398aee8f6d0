"""Measure the loading of a large sharded checkpoint: host memory, bytes per device, seconds.

    python -m tools.bench.loading                         2 GB, bfloat16 and float32
    python -m tools.bench.loading --gigabytes 0.5 --dtype bfloat16 --rounds 1
    python -m tools.bench.loading --quantize nf4 int8     quantized while reading, and otherwise

The script writes a Llama checkpoint with random weights. Each load runs in a separate process.

- host: peak growth of the process's resident memory while loading, minus the final memory of the
  devices (on a CPU it belongs to the process, too), relative to the checkpoint's size
- a device of four: bytes of tensors read for the device, relative to the checkpoint's size, minimum
  and maximum
- seconds: from the directory to a model with all pages touched, wall time and processor time. Runs
  of this project and of `transformers` on torch alternate; both have imported the model's code.
  torch copies nothing if the dtype is unchanged: its tensors are the pages of the mapped file. Here
  each matrix is transposed into new memory

With `--quantize`: the final memory of the model and the peak memory of the process, relative to the
checkpoint's size, for four ways: plain; quantized while reading; read and then quantized; and from
the file that the quantized model was saved to. On a CPU the peak includes host and device, because
the memory of the devices belongs to the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import command_line, machine, peak_growth, run_worker, table

ONE, FOUR = (1, 1, 1, 1, 1), (1, 4, 1, 1, 1)
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Result:
    """The measurements of one dtype.

    Attributes:
        dtype: Dtype of the checkpoint and of the parameters.
        size: Size of the checkpoint in bytes.
        host: Excess of the host's peak over the final memory, on one device and on four, over
            `size`.
        shares: Bytes that each of four devices read, over `size`.
        seconds: Wall and processor seconds of this project and of `transformers` (absent without
            torch).
    """

    dtype: str
    size: int
    host: tuple[float, float]
    shares: tuple[float, ...]
    seconds: dict[str, tuple[float, float]]


def make(directory: Path, gigabytes: float, dtype: str) -> int:
    """Write a sharded checkpoint of about `gigabytes` GB, and return its bytes."""
    import jax
    from ed_models.checkpoints.loading import weight_map
    from ed_models.checkpoints.tensor_writer import TensorSpec, write_tensors
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
    from flax import nnx

    width = np.dtype(jax.numpy.dtype(dtype))
    d, f, v = (SHAPE[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    layer, rest = 4 * d * d + 3 * d * f, 2 * v * d
    layers = max(1, round((gigabytes * 1e9 / width.itemsize - rest) / layer))
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype=dtype, sharding_axis_dims=ONE)
    state = nnx.state(nnx.eval_shape(lambda: LlamaForCausalLM(config, rngs=nnx.Rngs(0))))
    shapes = weight_map(LlamaForCausalLM, state, config).hf_shapes
    specs = {name: TensorSpec(shape, width) for name, shape in shapes.items()}
    rng = np.random.default_rng(0)

    def read(name: str) -> np.ndarray:
        values = rng.standard_normal(shapes[name], np.float32)
        return (values * 0.02).astype(width)

    directory.mkdir(parents=True)
    write_tensors(directory, specs, read, max_shard_size="500MB")
    config.replace(architectures=["LlamaForCausalLM"]).save_pretrained(directory)
    return sum(spec.nbytes for spec in specs.values())


def measure(gigabytes: float, dtype: str, rounds: int) -> Result:
    """Write a checkpoint, load it in other processes, and delete it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        size = make(directory, gigabytes, dtype)
        one = _worker("ours", directory, dtype, ONE)
        four = _worker("ours", directory, dtype, FOUR)
        times: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
        for _ in range(rounds):
            for who in times:
                found = _worker(who, directory, dtype, ONE)
                times[who] += [(found["seconds"], found["processor"])] if found else []
    excess = [(w["peak"] - w["held"]) / size for w in (one, four)]
    shares = tuple(n / size for n in four["read"])
    seconds = {
        who: (
            statistics.median(wall for wall, _ in all_),
            statistics.median(cpu for _, cpu in all_),
        )
        for who, all_ in times.items()
        if all_
    }
    return Result(dtype, size, (excess[0], excess[1]), shares, seconds)


#: Ways to a quantized model: (`from_pretrained` quantizes, `quantize` is called afterwards).
WAYS: Mapping[str, tuple[bool, bool]] = {
    "plain": (False, False),
    "quantized while reading": (True, False),
    "read, then quantized": (False, True),
    "from its own file": (False, False),
}


def measure_quantized(gigabytes: float, dtype: str, formats: Sequence[str]) -> str:
    """Load a checkpoint in each way and return a table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        size = make(directory, gigabytes, dtype)
        for form in formats:
            saved = Path(folder) / form
            for way in WAYS:
                source = saved if way == "from its own file" else directory
                done = _worker("ours", source, dtype, ONE, way, form, str(saved))
                disk = sum(file.stat().st_size for file in source.glob("*.safetensors"))
                rows.append(
                    [
                        f"{form}: {way}",
                        *(f"{n / size:.1%}" for n in (disk, done["held"], done["peak"])),
                        f"{done['seconds']:.2f} ({done['processor']:.2f})",
                    ]
                )
    header = [f"{dtype}, {size / 1e9:.2f} GB", "file", "held", "peak", "s (CPU)"]
    return table(header, rows)


def _worker(
    who: str, directory: Path, dtype: str, dims: tuple[int, ...], *more: str
) -> dict[str, Any]:
    """Load once in a separate process and return its report (empty without torch)."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={int(np.prod(dims))}"
    words = [who, str(directory), dtype, ",".join(map(str, dims)), *(more or ("plain", "", ""))]
    return run_worker("loading", ["--worker", *words], environment)


def work(
    who: str, directory: str, dtype: str, dims: str, way: str, form: str, saved: str
) -> dict[str, object]:
    """Load in this process; save a model that was quantized while reading to `saved`."""
    if who == "torch":
        return _theirs(directory)
    return _ours(directory, dtype, tuple(int(n) for n in dims.split(",")), way, form, saved)


def _ours(
    directory: str, dtype: str, dims: tuple[int, ...], way: str, form: str, saved: str
) -> dict[str, object]:
    import ed_models.families.llama  # noqa: F401  # only loading is measured
    import jax
    from ed_models import AutoEasyDeLModelForCausalLM
    from flax import nnx

    # Initialize the backend before the measurement.
    jax.block_until_ready(jax.numpy.ones(8) + 1)
    reads = _count_reads()
    kept: dict[str, Any] = {}
    spec = {"dtype": form} if form else None
    at_once, afterwards = WAYS[way]

    def load() -> None:
        began, used = time.perf_counter(), time.process_time()
        kept["model"] = AutoEasyDeLModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            param_dtype=dtype,
            sharding_axis_dims=dims,
            quantization_config=spec if at_once else None,
            apply_quantization=at_once,
        )
        if afterwards:
            kept["model"] = kept["model"].quantize(spec)
        leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(kept["model"])))
        _touch(s.data for leaf in leaves for s in leaf.addressable_shards)
        kept["seconds"] = time.perf_counter() - began
        kept["processor"] = time.process_time() - used

    peak = peak_growth(load)
    leaves = jax.tree.leaves(nnx.state(kept["model"]))
    held = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards)
    read = [reads[device.id] for device in jax.devices()]
    model = kept.pop("model")
    if at_once:
        model.save_pretrained(saved)
    return {"peak": peak, "held": held, "read": read, **kept}


def _count_reads() -> Mapping[int, int]:
    """Count the bytes of tensors that are read for each device from now on, by any thread."""
    import jax
    from ed_models.checkpoints.tensor_files import TensorFiles

    counts = {device.id: 0 for device in jax.devices()}
    of_thread, original = threading.local(), TensorFiles.read
    make_array, lock = jax.make_array_from_callback, threading.Lock()

    def read(self: TensorFiles, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        value = original(self, name, index)
        of_thread.total = getattr(of_thread, "total", 0) + value.nbytes
        return value

    def make(shape: Any, sharding: Any, callback: Any, **options: Any) -> jax.Array:
        for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
            of_thread.total = 0
            callback(index)  # the callback caches its value, so nothing is read twice
            with lock:
                counts[device.id] += of_thread.total
        return make_array(shape, sharding, callback, **options)

    TensorFiles.read, jax.make_array_from_callback = read, make  # type: ignore[method-assign]
    return counts


def _theirs(directory: str) -> dict[str, object]:
    try:
        import torch
    except ImportError:
        return {}
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM

    began, used = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    with torch.no_grad():
        _touch(p.contiguous().view(torch.uint8).numpy() for p in model.parameters())
    return {
        "seconds": time.perf_counter() - began,
        "processor": time.process_time() - used,
    }


def _touch(arrays: Any) -> None:
    """Read from every page, so that no loading is deferred."""
    for array in arrays:
        np.asarray(array).reshape(-1).view(np.uint8)[::4096].sum()


def show(results: list[Result]) -> str:
    rows = []
    for r in results:
        cells = [f"{r.seconds[who][0]:.2f} ({r.seconds[who][1]:.2f})" for who in r.seconds]
        ratio = (
            f"{r.seconds['torch'][0] / r.seconds['ours'][0]:.2f}" if "torch" in r.seconds else ""
        )
        rows.append(
            [
                f"{r.dtype}, {r.size / 1e9:.2f} GB",
                f"{r.host[0]:.1%}",
                f"{r.host[1]:.1%}",
                f"{min(r.shares):.1%} – {max(r.shares):.1%}",
                *[*cells, ""][:2],
                ratio,
            ]
        )
    header = ["", "host, 1 device", "host, 4 devices", "a device of four reads"]
    return table([*header, "ours s (CPU)", "torch s (CPU)", "torch / ours"], rows)


def main() -> None:
    parser = command_line("loading", __doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quantize", nargs="+", metavar="FORMAT", help="formats, for example nf4 int8"
    )
    parser.add_argument("--worker", nargs=7, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(work(*given.worker)))
        return
    print(machine())
    if given.quantize:
        for dtype in given.dtype:
            print(measure_quantized(given.gigabytes, dtype, given.quantize))
        return
    print(show([measure(given.gigabytes, dtype, given.rounds) for dtype in given.dtype]))


if __name__ == "__main__":
    main()
