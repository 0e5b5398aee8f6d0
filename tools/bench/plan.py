"""Compare the predictions of `elarge plan` with compilers, processes, and published speeds.

    python -m tools.bench.plan steps       68 steps of Llama, Qwen3 and Mixtral: the CPU compiler
    python -m tools.bench.plan families    two steps of each family: the CPU compiler
    python -m tools.bench.plan meshes      20 meshes of eight devices: the CPU compiler
    python -m tools.bench.plan resident    five runs on one CPU device: resident memory
    python -m tools.bench.plan slices      steps near the memory of TPU slices: libtpu
    python -m tools.bench.plan times       the speed of MaxText on TPUs, from its documentation

The compiler runs in this process and executes nothing, because the devices are simulated.
`--json FILE` writes every figure of the first three.

`slices` prints the table of all stored steps; `--missing` compiles the steps without figures, for
`--minutes`. libtpu (`pip install libtpu`) compiles the train step for the slice, which needs no TPU
and some minutes for each step. `docs/slices.json` contains 50 steps, and the figures of the
compiler after each compilation. The steps were drawn at random among those for which the plan of
that time predicted 85 % to 115 % of the memory.

The sources of `times` are two tables of MaxText's documentation: "Optimized models tiering",
version 0.2.0 (https://maxtext.readthedocs.io/en/maxtext-v0.2.0/reference/models/tiering.html), with
tokens per second and device on v6e and v5p, and the expected performance of `MaxText/configs/v5e`,
with the share of the peak (MFU). The batches are those of MaxText's benchmark configurations where
they exist, otherwise four sequences on a device. All steps recompute their layers
(`nothing_saveable`); some of the published runs recompute less.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.plan import settings, shapes, training
from ed_elarge.plan.buffers import ACCELERATOR, CPU, Buffers
from ed_elarge.plan.devices import GIB, Hardware, find_device, parse_hardware
from ed_elarge.plan.estimate import plan_run
from ed_elarge.plan.mesh import build_mesh
from ed_elarge.plan.timing import Time

from tests.bench.plan_cases import BASE, STEPS, Case, families, run_of
from tools.bench.measure import command_line, machine, peak_growth, run_worker, table
from tools.workspace import ROOT

RESULTS = ROOT / "docs/slices.json"
DEVICES = 8
_LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "rows": 2}
#: A run whose resident memory beyond the prediction is that of the process: loaded programs, and
#: packed factors of matrix products. The prediction of each other run is increased by it.
PROCESS: Case = {
    **_LARGE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 8,
}
#: Changes of `plan_cases.BASE` whose steps need about one to two GB on one device.
RESIDENT: dict[str, Case] = {
    "base": _LARGE,
    "10 layers": {**_LARGE, "num_hidden_layers": 10},
    "32000 words": {**_LARGE, "vocab_size": 32000, "num_hidden_layers": 2},
    "all kept": {"remat": "", "rows": 6, "length": 1024},
    "adapters, all kept": {**_LARGE, "lora": 8, "remat": "", "rows": 4},
}


@dataclass(frozen=True)
class MemoryRow:
    """The memory of one step on a device, in bytes.

    Attributes:
        name: the case.
        arguments, temporary: the prediction.
        compiled_arguments, compiled_temporary: the compiler's figures.
    """

    name: str
    arguments: int
    temporary: int
    compiled_arguments: int
    compiled_temporary: int

    @property
    def predicted(self) -> int:
        """Predicted bytes."""
        return self.arguments + self.temporary

    @property
    def needed(self) -> int:
        """Bytes by the compiler."""
        return self.compiled_arguments + self.compiled_temporary

    @property
    def error(self) -> float:
        """Relative error of the sum."""
        return self.predicted / self.needed - 1


def predicted(case: Case, buffers: Buffers, devices: int) -> training.PlannedStep:
    """Return the prediction of a case."""
    run = run_of(case)
    options, mesh = settings.training(run), build_mesh(run, devices)
    return training.step(options, shapes.get_shapes(run), mesh, buffers)


def on_cpu(name: str, case: Case) -> MemoryRow:
    """Compile a case for simulated devices."""
    from ed_elarge.plan.answers import answer_train

    step = predicted(case, CPU, DEVICES)
    length = {**BASE, **case}["length"]
    found = answer_train(run_of(case), {"vocab": None, "length": length})
    sizes = found["arguments"], found["temporary"]
    return MemoryRow(name, step.arguments, step.temporary, *sizes)


def meshes() -> dict[str, Case]:
    """Return a step of a small model on each mesh of eight devices over dp, fsdp, tp and sp."""
    heads = {"num_key_value_heads": 8, "length": 1024, "vocab_size": 32000}
    found = {}
    for dp in (1, 2, 4, 8):
        for fsdp in (1, 2, 4, 8):
            for tp in (1, 2, 4, 8):
                sp, rest = divmod(DEVICES, dp * fsdp * tp)
                if sp and not rest:
                    name = f"dp {dp}, fsdp {fsdp}, tp {tp}, sp {sp}"
                    found[name] = {**heads, "mesh": [dp, fsdp, 1, tp, sp]}
    return found


def measured(cases: Mapping[str, Case]) -> Iterable[MemoryRow]:
    """Yield the row of each case, and print it."""
    for name, case in cases.items():
        row = on_cpu(name, case)
        print(f"{name:<48}{row.error:>+9.2%}", flush=True)
        yield row


def summary(rows: list[MemoryRow]) -> str:
    """Return the errors of all rows as a table."""
    errors = sorted(abs(row.error) for row in rows)
    exact = max(abs(row.arguments / row.compiled_arguments - 1) for row in rows)
    cells = [
        str(len(rows)),
        f"{exact:.4%}",
        f"{statistics.median(errors):.2%}",
        f"{errors[int(0.9 * len(errors))]:.2%}",
        f"{errors[-1]:.2%}",
    ]
    return table(["steps", "worst of arguments", "median", "9 of 10 within", "worst"], [cells])


def best_mesh(rows: list[MemoryRow]) -> str:
    """Return how much more memory the mesh with the least prediction needs than the best."""
    chosen, best = min(rows, key=lambda r: r.predicted), min(rows, key=lambda r: r.needed)
    more = chosen.needed / best.needed - 1
    return (
        f"least prediction: {chosen.name}; least memory by the compiler: {best.name}; the first "
        f"needs {more:.1%} more"
    )


def resident(name: str, case: Case) -> tuple[str, int, int]:
    """Train two steps in a new process, and return the name, the prediction, and the growth.

    The process is started twice: the first one compiles the programs and stores them, because the
    memory of a compiler is not that of a step.
    """
    step = predicted({**case, "mesh": [1, 1, 1, 1, 1]}, CPU, 1)
    words = ["grow", "--case", json.dumps(case)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "ED_LAYERS_NATIVE": "0",
            "XLA_FLAGS": "",
        }
        _, grown = (run_worker("plan", words, environment) for _ in range(2))
    return name, step.arguments + step.temporary, grown


#: Changes of a case for a run that imports the same modules and needs no memory.
TINY: Case = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 512,
    "length": 32,
    "rows": 2,
}


def grow(case: Case) -> int:
    """Train two steps of a case on one device, and return the peak growth of resident memory.

    A tiny run precedes, so that imported modules and compilers are not counted.
    """
    train({**case, **TINY})
    return peak_growth(lambda: train(case))


def train(case: Case) -> None:
    """Train two steps of a case on one device."""
    from ed_elarge.actions.execution import execute
    from ed_elarge.config.normalize import normalize
    from ed_elarge.errors import Document

    values = run_of({**case, "mesh": [1, 1, 1, 1, 1]}).to_dict()
    length, rows = {**BASE, **case}["length"], {**BASE, **case}["rows"]
    with tempfile.TemporaryDirectory() as folder:
        words = " ".join(f"word{i}" for i in range(2 * length))
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps({"text": words}) + "\n" for _ in range(rows)))
        values["model"]["tokenizer"] = {"train": {"vocab_size": 400}}
        inform = {"type": "json", "data_files": str(file), "content_field": "text"}
        values["mixture"]["informs"] = [inform]
        values["trainer"] |= {
            "save_directory": f"{folder}/run",
            "do_last_save": False,
            "use_tensorboard": False,
        }
        if execute(normalize(Document("plan.yaml", value=values))).code:
            raise SystemExit("the run failed")


def show_resident(cases: Mapping[str, Case]) -> str:
    """Measure all cases, print each error, and return the table of memory."""
    _, step, grown = resident("process", PROCESS)
    process = grown - step
    print(f"memory of the process, by another run: {process / GIB:.2f} GiB", flush=True)
    rows = []
    for case in cases.items():
        name, step, grown = resident(*case)
        ours = step + process
        rows.append([name, f"{ours / GIB:.2f}", f"{grown / GIB:.2f}", f"{ours / grown - 1:+.1%}"])
        print(*rows[-1], flush=True)
    return table(["run", "predicted GiB", "resident GiB", "error"], rows)


@dataclass(frozen=True)
class Compiled:
    """One step and the figures of the compiler for a device.

    Attributes:
        case: the step.
        fits: whether the step compiles; None: it was not compiled yet.
        needed: largest number of bytes at the same time. The compiler's error states it for a step
            that does not fit, rounded to 10 MiB. None: only the verdict is known.
        arguments: bytes of the arguments; None if the step does not fit.
    """

    case: Case
    fits: bool | None
    needed: int | None
    arguments: int | None


@dataclass(frozen=True)
class Verdict:
    """The prediction for one step next to the figures of the compiler, in bytes."""

    compiled: Compiled
    arguments: int
    predicted: int
    limit: int

    @property
    def agrees(self) -> bool:
        """Whether prediction and compiler agree about whether the step fits."""
        return (self.predicted <= self.limit) == self.compiled.fits

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if only the verdict is known."""
        needed = self.compiled.needed
        return None if needed is None else self.predicted / needed - 1

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        case, needed = self.compiled.case, self.compiled.needed
        shape = f"{case['hidden_size']} x {case['num_hidden_layers']}, {case['length']} tokens"
        return [
            case["topology"],
            f"{shape}, {case['remat'] or 'all kept'}",
            "" if needed is None else f"{needed / self.limit:.3f}",
            "" if self.error is None else f"{self.error:+.1%}",
            "equal" if self.agrees else "**different**",
        ]


def verdict(compiled: Compiled) -> Verdict:
    """Return the prediction of the plan for a compiled step."""
    hardware = parse_hardware(compiled.case["topology"], None)
    step = predicted(compiled.case, ACCELERATOR, hardware.count)
    total = step.arguments + step.temporary
    return Verdict(compiled, step.arguments, total, hardware.device.usable)


def read() -> list[Compiled]:
    """Return all steps with the stored figures."""
    return [Compiled(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def store(rows: list[Compiled]) -> None:
    """Store all figures."""
    text = ",\n".join(json.dumps(asdict(row)) for row in rows)
    RESULTS.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def _needed(message: str) -> int | None:
    """Return the bytes in the compiler's error about memory; None for another error.

    The message has two forms; the first states the sum of arguments and temporary buffers.
    """
    total = re.search(r"Used ([\d.]+)([GM]) of [\d.]+[GM] hbm", message)
    alone = re.search(r"required for HLO temporaries \(([\d.]+)([GM])\)", message)
    found = total or alone
    if found is None:
        return None
    return int(float(found[1]) * (GIB if found[2] == "G" else 2**20))


def compiled_step(case: Case) -> Compiled:
    """Compile a step for the TPU slice that it names."""
    from ed_elarge.plan.answers import answer_train

    hardware = parse_hardware(case["topology"], None)
    kind, _, sizes = case["topology"].partition(":")
    ones = ["1"] * (hardware.device.torus - len(hardware.shape))
    request: Any = {
        "vocab": None,
        "length": {**BASE, **case}["length"],
        "topology": f"{kind}:{'x'.join([*sizes.split('x'), *ones])}",
    }
    try:
        found = answer_train(run_of(case), request)
    except Exception as error:  # the error class of jax depends on its version
        needed = _needed(str(error))
        if needed is None:
            raise
        return Compiled(case, fits=False, needed=needed, arguments=None)
    total = found["arguments"] + found["temporary"]
    return Compiled(case, fits=True, needed=total, arguments=found["arguments"])


def slice_summary(rows: list[Verdict]) -> str:
    """Return the errors of all steps."""
    errors = sorted(abs(row.error) for row in rows if row.error is not None)
    exact = max(
        abs(row.arguments / row.compiled.arguments - 1)
        for row in rows
        if row.compiled.arguments is not None
    )
    return (
        f"{sum(row.agrees for row in rows)} of {len(rows)} verdicts are equal. Memory: "
        f"median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}. "
        f"Worst error of the arguments: {exact:.4%}."
    )


def show_slices(*, missing: bool, minutes: float) -> None:
    """Compile what is missing, and print the table of slices."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    rows = read()
    began = time.monotonic()
    if missing:
        # Steps without a verdict precede those without a number of bytes.
        for place in sorted(range(len(rows)), key=lambda place: rows[place].fits is not None):
            if rows[place].needed is not None:
                continue
            if time.monotonic() - began > 60 * minutes:
                break
            start = time.monotonic()
            rows[place] = compiled_step(rows[place].case)
            store(rows)
            cells = verdict(rows[place]).cells
            print(" | ".join(cells), f"| {time.monotonic() - start:.0f} s", flush=True)
    verdicts = [verdict(row) for row in rows if row.fits is not None]
    header = ["slice", "step", "needed / memory", "error", "verdicts"]
    print(table(header, [row.cells for row in verdicts]))
    print(slice_summary(verdicts))


class Published(NamedTuple):
    """A published run.

    Attributes:
        model, device, devices: the model, and the devices.
        length, rows: tokens of a sequence, and sequences of a device.
        speed: tokens per second and device, or the share of the peak (below 1).
        tp: size of the axis `tp`; the other devices are those of `fsdp`.
    """

    model: str
    device: str
    devices: int
    length: int
    rows: int
    speed: float
    tp: int = 1


def _llama(
    hidden: int, inner: int, layers: int, heads: int, vocab: int, kv_heads: int = 8
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def _mixtral(hidden: int, inner: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    return {**_llama(hidden, inner, layers, heads, vocab), **experts}


MODELS = {
    "Llama 2 70B": _llama(8192, 28672, 80, 64, 32000),
    "Llama 3.1 8B": _llama(4096, 14336, 32, 32, 128256),
    "Llama 3.1 70B": _llama(8192, 28672, 80, 64, 128256),
    "Llama 3.1 405B": _llama(16384, 53248, 126, 128, 128256),
    "Mixtral 8x7B": _mixtral(4096, 14336, 32, 32, 32000),
    "Mixtral 8x22B": _mixtral(6144, 16384, 56, 48, 32768),
    # MaxText's default model with `global_parameter_scale` 16, 32, 64 and 128.
    "MaxText 16B": _llama(4096, 14336, 64, 32, 32000, 32),
    "MaxText 32B": _llama(8192, 28672, 32, 64, 32000, 64),
    "MaxText 64B": _llama(8192, 28672, 64, 64, 32000, 64),
    "MaxText 128B": _llama(8192, 28672, 128, 64, 32000, 64),
}
SPEEDS = (
    Published("Llama 2 70B", "v6e", 256, 4096, 4, 900),
    Published("Llama 3.1 8B", "v6e", 256, 8192, 4, 7207),
    Published("Llama 3.1 70B", "v6e", 256, 8192, 4, 960),
    Published("Llama 3.1 405B", "v6e", 256, 8192, 1, 123),
    Published("Mixtral 8x7B", "v6e", 256, 4096, 4, 3899),
    Published("Mixtral 8x22B", "v6e", 256, 4096, 4, 1326),
    Published("Llama 2 70B", "v5p", 512, 4096, 4, 692),
    Published("Mixtral 8x7B", "v5p", 256, 4096, 4, 2909),
    Published("MaxText 16B", "v5e", 256, 2048, 6, 0.611),
    Published("MaxText 32B", "v5e", 256, 2048, 4, 0.6686),
    Published("MaxText 64B", "v5e", 256, 2048, 2, 0.599),
    Published("MaxText 128B", "v5e", 256, 2048, 1, 0.5606, tp=16),
)


def bound(one: Published) -> Time:
    """Return the bound of a run's step."""
    values = {
        "model": {
            "config": {**MODELS[one.model], "max_position_embeddings": 131072},
            "tokenizer": "tokenizer",
        },
        "loader": {"dtype": "bf16", "param_dtype": "bf16"},
        "sharding": {"axis_dims": [1, -1, 1, one.tp, 1]},
        "base_config": {"values": {"gradient_checkpointing": "nothing_saveable"}},
        "mixture": {
            "informs": [{"type": "json", "data_files": "rows.jsonl"}],
            "pack_tokens": True,
            "pack_seq_length": one.length,
        },
        "trainer": {
            "trainer_type": "sft",
            "total_batch_size": one.rows * one.devices,
            "max_training_steps": 2,
        },
        "actions": ["train"],
    }
    run = normalize(Document("plan.yaml", value=values))
    made = plan_run(run, Hardware(find_device(one.device), (one.devices,))).training
    assert made is not None, "the run trains"
    return made.time


def share(one: Published) -> float:
    """Return the published speed relative to the bound."""
    time = bound(one)
    return one.speed / (time.mfu if one.speed < 1 else time.tokens_per_second / one.devices)


def errors(shares: list[float]) -> list[float]:
    """Return the errors of the time of each run, predicted by the median share of the others."""
    found = []
    for i, own in enumerate(shares):
        others = shares[:i] + shares[i + 1 :]
        found.append(abs(own / statistics.median(others) - 1))
    return sorted(found)


def show_times() -> None:
    """Print the bounds and the published speeds."""
    rows = []
    of_device: dict[str, list[float]] = {}
    for one in SPEEDS:
        own = share(one)
        of_device.setdefault(one.device, []).append(own)
        time = bound(one)
        rows.append([f"{one.model}, {one.devices} {one.device}", time.bound, f"{own:.0%}"])
    print(table(["run", "bound by", "published speed, share of the bound"], rows))
    for device, shares in of_device.items():
        print(f"{device}: median share {statistics.median(shares):.0%}")
    found = sorted(error for shares in of_device.values() for error in errors(shares))
    print(
        f"with the median share of the device's other runs: median error of the time "
        f"{statistics.median(found):.0%}, largest {found[-1]:.0%}, {len(found)} runs"
    )


def main() -> None:
    """Run one comparison."""
    parser = command_line("plan", __doc__)
    kinds = ("steps", "families", "meshes", "resident", "slices", "times", "grow")
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--case", type=json.loads, default={}, help="of grow, as JSON")
    parser.add_argument("--missing", action="store_true", help="of slices: compile the others")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no step after")
    arguments = parser.parse_args()
    if arguments.kind == "times":
        show_times()
        return
    if arguments.kind == "grow":
        print(grow(arguments.case))
        return
    os.environ.setdefault("ED_LAYERS_NATIVE", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.kind == "slices":
        show_slices(missing=arguments.missing, minutes=arguments.minutes)
        return
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0",
    )
    if arguments.kind == "resident":
        print(show_resident(RESIDENT))
        return
    chosen = {"steps": STEPS, "families": families(), "meshes": meshes()}[arguments.kind]
    rows = [*measured(chosen)]
    print(machine())
    print(summary(rows))
    if arguments.kind == "meshes":
        print(best_mesh(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
