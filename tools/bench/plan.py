"""Compare the predictions of `elarge plan` with compilers, and with the memory of processes.

    python -m tools.bench.plan steps       68 steps of Llama, Qwen3 and Mixtral: the CPU compiler
    python -m tools.bench.plan families    two steps of each family: the CPU compiler
    python -m tools.bench.plan meshes      20 meshes of eight devices: the CPU compiler
    python -m tools.bench.plan resident    five runs on one CPU device: resident memory

The compiler runs in this process and executes nothing, because the devices are simulated.
`--json FILE` writes every figure. `tools.bench.plan_slices` compiles for TPU slices.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ed_elarge.plan import settings, shapes, training
from ed_elarge.plan.buffers import CPU, Buffers
from ed_elarge.plan.devices import GIB
from ed_elarge.plan.mesh import mesh_of

from tools.bench.measure import command_line, machine, peak_growth, table
from tools.bench.plan_cases import BASE, STEPS, Case, families, run_of

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
    own, mesh = settings.training(run), mesh_of(run, devices)
    return training.step(own, shapes.of_run(run), mesh, buffers)


def on_cpu(name: str, case: Case) -> MemoryRow:
    """Compile a case for simulated devices."""
    from ed_elarge.plan.answers import train

    step = predicted(case, CPU, DEVICES)
    length = {**BASE, **case}["length"]
    found = train(run_of(case), {"vocab": None, "length": length})
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
    command = [sys.executable, "-m", "tools.bench.plan", "grow", "--case", json.dumps(case)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "ED_LAYERS_NATIVE": "0",
            "XLA_FLAGS": "",
        }
        for _ in range(2):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(done.stderr)
    return name, step.arguments + step.temporary, int(done.stdout.strip().splitlines()[-1])


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
        if execute(normalize(Document("plan.yaml", value=values))):
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


def main() -> None:
    """Run one comparison."""
    parser = command_line("plan", __doc__)
    kinds = ("steps", "families", "meshes", "resident", "grow")
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    parser.add_argument("--case", type=json.loads, default={}, help="of grow, as JSON")
    arguments = parser.parse_args()
    if arguments.kind == "grow":
        print(grow(arguments.case))
        return
    os.environ.setdefault("ED_LAYERS_NATIVE", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
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
