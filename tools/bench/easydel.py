"""Run the same run files here and in EasyDeL: losses beside torch in float64, speed and memory.

    EASYDEL_PYTHON=PATH python -m tools.bench.easydel losses [--methods sft dpo] [--steps 4]
    EASYDEL_PYTHON=PATH python -m tools.bench.easydel losses --write
    EASYDEL_PYTHON=PATH python -m tools.bench.easydel times [--rounds 3] [--steps 40] --write

`EASYDEL_PYTHON` is an interpreter with `easydel`. Without it, its column is empty. Both programs
read the same file, which has only keys that both accept, with the same tiny checkpoint and rows.
The weights are rounded to float16, because EasyDeL reads checkpoints through float16. `--write`
writes a table into docs/migrate/easydel.md.

The third column computes each loss from its definition with torch in float64, one row after
another, without packing: the batches in the order of the file, and `torch.optim.AdamW`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tools import pages
from tools.bench import measure
from tools.bench.float64_losses import LEARNING_RATE, compute_losses
from tools.workspace import ROOT

CHILD = Path(__file__).with_name("easydel_child.py")
PAGE = ROOT / "docs/migrate/easydel.md"
#: The lines around each table of the page.
PARTS = {
    "losses": ("<!-- tools/bench/easydel.py -->\n", "<!-- end of losses -->\n"),
    "times": ("<!-- tools/bench/easydel.py times -->\n", "<!-- end of times -->\n"),
}
METHODS = ("sft", "dpo", "orpo", "cpo", "reward", "distillation")
ROWS = 4  # sequences, or pairs, of a step
#: Methods that read texts; the others read pairs.
_ON_TEXTS = ("sft", "distillation")
_OPTIONS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.1},
    "orpo": {"beta": 0.1},
    "cpo": {"beta": 0.1, "loss_type": "sigmoid"},
    "reward": {"center_rewards_coefficient": 0.1},
    "distillation": {"alpha": 0.5, "temperature": 2.0},
}


class ProgramRun(NamedTuple):
    """What a program did with a run file.

    Attributes:
        losses: Loss of each step.
        moments: Time of each step in seconds since the start of the process.
        peak: Peak memory of the process in GiB.
        error: The end of its output, if it failed.
    """

    losses: list[float]
    moments: list[float]
    peak: float
    error: str = ""


def write_case(folder: Path, count: int = 256) -> None:
    """Write checkpoints (`model`, `teacher`, `scorer`) and rows (`pairs.jsonl`, `texts.jsonl`)."""
    import torch
    import transformers
    from ed_data import train_bpe

    sums = [(a, b) for a in range(16) for b in range(16)][:count]
    rows = [
        {
            "prompt": f"What is {a} + {b}?",
            "chosen": f" It is {a + b}.",
            "rejected": f" I do not know {'really ' * (b % 3)}.",
        }
        for a, b in sums
    ]
    texts = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    for name, lines in (("pairs", rows), ("texts", texts)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    tokenizer = train_bpe([row["text"] + " I do not know." for row in texts], 300)
    sizes: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for seed, name in enumerate(("model", "teacher", "scorer")):
        kind = "LlamaForSequenceClassification" if name == "scorer" else "LlamaForCausalLM"
        labels: dict[str, Any] = {"num_labels": 1} if name == "scorer" else {}
        config = transformers.LlamaConfig(**sizes, **labels)
        torch.manual_seed(seed)
        model = getattr(transformers, kind)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half().float())
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_run_file(folder: Path, method: str, steps: int, **options: Any) -> Path:
    """Write the run file of a method, which both programs read, with some options of `trainer`."""
    rows = {"type": "json", "data_files": str(folder / "pairs.jsonl")}
    if method in _ON_TEXTS:
        rows |= {"data_files": str(folder / "texts.jsonl"), "content_field": "text"}
    trainer = {
        "trainer_type": method,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.0,
        "num_train_epochs": 1,
        "total_batch_size": ROWS,
        "max_training_steps": steps,
        "max_length": 64,
        "log_steps": 1,
        "report_steps": 1,
        "shuffle_train_dataset": False,
        "save_directory": "out",
        **_OPTIONS.get(method, {}),
        **options,
    }
    if method in ("dpo", "orpo", "cpo"):
        trainer |= {"max_prompt_length": 32, "max_completion_length": 32}
    model = {"name_or_path": str(folder / "model")}
    if method == "reward":
        model = {"name_or_path": str(folder / "scorer"), "task": "sequence-classification"}
    sections = {
        "model": model,
        "loader": {"dtype": "fp32", "param_dtype": "fp32"},
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "base_config": {"values": {"attn_mechanism": "vanilla", "attn_dtype": "fp32"}},
        "mixture": {"informs": [rows], "batch_size": ROWS},
        "trainer": trainer,
        "actions": ["validate", "train"],
    }
    if method == "dpo":
        sections["reference_model"] = {"name_or_path": str(folder / "model")}
    if method == "distillation":
        sections["teacher_model"] = {"name_or_path": str(folder / "teacher")}
    path = folder / f"{method}.yaml"
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    return path


def run_here(run_file: Path) -> ProgramRun:
    """Run a file in this project."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "ed_elarge", str(run_file)]
        began, peak, error = _run_process(command, directory, dict(os.environ))
        lines = _read_lines(Path(directory) / "out/metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    moments = [line["time"] - began for line in steps]
    return ProgramRun([line["loss"] for line in steps], moments, peak, error)


def run_there(run_file: Path, interpreter: str) -> ProgramRun:
    """Run a file in EasyDeL."""
    others = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        # Without -P, the folder of the program is searched first, and this file has the same name
        # as EasyDeL.
        command = [interpreter, "-P", str(CHILD), str(run_file), str(metrics)]
        environment = {**others, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        began, peak, error = _run_process(command, directory, environment)
        lines = _read_lines(metrics)
    # A program may log a step more than once.
    steps = {line["step"]: line for line in lines if "train/loss" in line["metrics"]}
    moments = [line["time"] - began for line in steps.values()]
    losses = [line["metrics"]["train/loss"] for line in steps.values()]
    return ProgramRun(losses, moments, peak, error)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _run_process(
    command: list[str], directory: str, environment: dict[str, str]
) -> tuple[float, float, str]:
    """Return the start of a process, its peak memory in GiB, and its last words if it failed."""
    log = Path(directory) / "log.txt"
    cpu = {"JAX_PLATFORMS": environment.get("JAX_PLATFORMS", "cpu"), "XLA_FLAGS": ""}
    began = time.time()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=environment | cpu, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    failed = process.returncode != 0
    tail = log.read_text(errors="replace").strip()[-400:] if failed else ""
    return began, usage.ru_maxrss / 2**20, tail


def compare_losses(folder: Path, methods: Sequence[str], steps: int, other: str | None) -> str:
    """Return a table of the losses of each step, and of the largest relative distances."""
    rows: list[list[str]] = []
    for method in methods:
        run_file = write_run_file(folder, method, steps)
        exact = compute_losses(folder, method, steps, ROWS)
        here = run_here(run_file)
        there = run_there(run_file, other) if other else ProgramRun([], [], 0.0)
        columns = {"here": here, "EasyDeL": there}
        rows.append([method, "float64", *(f"{loss:.6f}" for loss in exact), ""])
        for name, run in columns.items():
            losses = [f"{loss:.6f}" for loss in run.losses] or ["-"] * steps
            distances = [abs(a / b - 1) for a, b in zip(run.losses, exact, strict=False)]
            rows.append([method, name, *losses, f"{max(distances):.0e}" if distances else "-"])
            if run.error:
                print(f"{method}, {name}: {run.error}", file=sys.stderr)
    numbers = [f"step {number + 1}" for number in range(steps)]
    return measure.table(["method", "program", *numbers, "distance"], rows)


def write_table(what: str, table: str) -> None:
    """Write a table into its part of the page about EasyDeL, with the name of this machine."""
    part = f"{table.rstrip()}\n\nMeasured on {measure.machine()}.\n"
    text = pages.with_part(PAGE.read_text(encoding="utf-8"), *PARTS[what], part)
    PAGE.write_text(text, encoding="utf-8")


def compare_times(folder: Path, steps: int, rounds: int, other: str) -> str:
    """Return a table of speed, start, memory and import of `sft`; the programs take turns."""
    run_file = write_run_file(folder, "sft", steps)
    runs: dict[str, list[ProgramRun]] = {"here": [], "EasyDeL": []}
    for _ in range(rounds):
        runs["here"].append(run_here(run_file))
        runs["EasyDeL"].append(run_there(run_file, other))
    tokens = ROWS * 64
    rows: list[list[str]] = []
    for name, each in runs.items():
        # The second half of the steps, after every program is compiled.
        count, half = steps - steps // 2, steps // 2 - 1
        speeds = [tokens * count / (run.moments[-1] - run.moments[half]) for run in each]
        cells = [
            f"{statistics.median(speeds):,.0f}",
            f"{statistics.median(r.moments[0] for r in each):.1f}",
            f"{statistics.median(r.peak for r in each):.2f}",
            f"{statistics.median(_time_import(name, other) for _ in range(rounds)):.1f}",
        ]
        rows.append([name, *cells])
    header = ["program", "positions/s", "seconds to step 1", "peak GiB", "seconds of the import"]
    return measure.table(header, rows)


def _time_import(name: str, other: str) -> float:
    """Return the seconds of a process that imports the names of a script."""
    script = "import easydel as ed; ed.eLargeModel"
    command, environment = [other, "-c", script], dict(os.environ)
    if name == "here":
        command = [sys.executable, "-c", script]
    else:
        environment.pop("PYTHONPATH", None)
    began = time.perf_counter()
    subprocess.run(command, env=environment, capture_output=True, check=True)
    return time.perf_counter() - began


def main() -> None:
    """Print a table of losses or of times."""
    parser = measure.command_line("easydel", __doc__)
    parser.add_argument("what", choices=("losses", "times"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    options = parser.parse_args()
    other = os.environ.get("EASYDEL_PYTHON")
    folder = Path(tempfile.mkdtemp(prefix="easydel-"))
    try:
        write_case(folder)
        if options.what == "losses":
            table = compare_losses(folder, options.methods, options.steps, other)
        elif other is None:
            parser.error("set EASYDEL_PYTHON to an interpreter with easydel")
        else:
            table = compare_times(folder, options.steps, options.rounds, other)
        print(table)
        if options.write:
            write_table(options.what, table)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
