"""Compare the verdicts of `elarge plan` with libtpu, for steps near the memory of TPU slices.

    python -m tools.bench.plan_slices              the table of all stored steps; compiles nothing
    python -m tools.bench.plan_slices --missing    compile the steps that are not stored
    python -m tools.bench.plan_slices --missing --minutes 60

libtpu (`pip install libtpu`) compiles the train step for the slice, which needs no TPU and some
minutes for each step. `docs/slices.json` stores the figures of the compiler after each step.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ed_elarge.plan.buffers import ACCELERATOR
from ed_elarge.plan.devices import GIB, parse

from tools.bench.measure import command_line, table
from tools.bench.plan import predicted
from tools.bench.plan_cases import BASE, Case, run_of
from tools.workspace import ROOT

RESULTS = ROOT / "docs/slices.json"

#: Widths of models for TPU slices: hidden, intermediate, heads, key heads, head size.
_SHAPES = (
    (2048, 8192, 32, 8, 64),
    (2048, 5632, 16, 16, 128),
    (2560, 9728, 32, 8, 128),
    (3072, 8192, 24, 8, 128),
    (4096, 14336, 32, 8, 128),
    (5120, 13824, 40, 8, 128),
)
_SLICES = (
    ("v5e:2x2", [1, 4, 1, 1, 1], 4),
    ("v5e:2x2", [1, 2, 1, 2, 1], 2),
    ("v5e:2x4", [1, 8, 1, 1, 1], 8),
    ("v5e:4x4", [1, 16, 1, 1, 1], 16),
    ("v5e:4x4", [1, 4, 1, 4, 1], 4),
    ("v6e:2x2", [1, 4, 1, 1, 1], 4),
)


def share(case: Case) -> float:
    """Return the share of the memory that a step needs by the prediction."""
    hardware = parse(case["topology"], None)
    step = predicted(case, ACCELERATOR, hardware.count)
    return (step.arguments + step.temporary) / hardware.device.usable


def _deep(case: Case, layers: int) -> Case:
    return {**case, "num_hidden_layers": layers}


def near_the_limit(count: int, seed: int) -> Iterator[Case]:
    """Yield cases that need 85 % to 115 % of the memory of a TPU by the prediction.

    Args:
        count: number of cases.
        seed: seed of the choice.
    """
    choose = random.Random(seed)
    made = 0
    while made < count:
        d, f, h, g, k = choose.choice(_SHAPES)
        topology, mesh, ways = choose.choice(_SLICES)
        case: Case = {
            "hidden_size": d,
            "intermediate_size": f,
            "num_attention_heads": h,
            "num_key_value_heads": g,
            "head_dim": k,
            "vocab_size": choose.choice((32000, 128256)),
            "length": choose.choice((1024, 2048, 4096, 8192)),
            "rows": ways * choose.choice((1, 2, 4)),
            "mesh": mesh,
            "topology": topology,
            "remat": choose.choice(("nothing_saveable", "nothing_saveable", "dots_saveable", "")),
            "optimizer": choose.choice(("adamw", "adamw", "lion")),
            "dtype": "bfloat16",
            "param_dtype": choose.choice(("float32", "bfloat16")),
        }
        wanted = 0.85 + 0.3 * (made + 0.5) / count
        layers = min(range(2, 81), key=lambda n: abs(share(_deep(case, n)) - wanted))
        if abs(share(_deep(case, layers)) - wanted) < 0.03:
            made += 1
            yield _deep(case, layers)


@dataclass(frozen=True)
class Compiled:
    """The figures of the compiler for one step on a device.

    Attributes:
        case: the step.
        fits: whether the step compiles.
        needed: bytes of arguments and temporary buffers. The compiler's error states them for a
            step that does not fit, rounded to 10 MiB.
        arguments: bytes of the arguments; None if the step does not fit.
    """

    case: Case
    fits: bool
    needed: int
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
    def cells(self) -> list[str]:
        """The row of the table."""
        case = self.compiled.case
        shape = f"{case['hidden_size']} x {case['num_hidden_layers']}, {case['length']} tokens"
        return [
            case["topology"],
            f"{shape}, {case['remat'] or 'all kept'}",
            f"{self.compiled.needed / self.limit:.3f}",
            f"{self.predicted / self.compiled.needed - 1:+.1%}",
            "equal" if self.agrees else "**different**",
        ]


def verdict(compiled: Compiled) -> Verdict:
    """Return the prediction of the plan for a compiled step."""
    hardware = parse(compiled.case["topology"], None)
    step = predicted(compiled.case, ACCELERATOR, hardware.count)
    total = step.arguments + step.temporary
    return Verdict(compiled, step.arguments, total, hardware.device.usable)


def read() -> list[Compiled]:
    """Return the stored figures."""
    if not RESULTS.is_file():
        return []
    return [Compiled(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))]


def store(rows: list[Compiled]) -> None:
    """Store all figures."""
    text = ",\n".join(json.dumps(asdict(row)) for row in rows)
    RESULTS.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def compiled_step(case: Case) -> Compiled:
    """Compile a step for the TPU slice that it names."""
    from ed_elarge.plan.answers import train

    hardware = parse(case["topology"], None)
    kind, _, sizes = case["topology"].partition(":")
    ones = ["1"] * (hardware.device.torus - len(hardware.shape))
    request: Any = {
        "vocab": None,
        "length": {**BASE, **case}["length"],
        "topology": f"{kind}:{'x'.join([*sizes.split('x'), *ones])}",
    }
    try:
        found = train(run_of(case), request)
    except Exception as error:  # the error class of jax depends on its version
        used = re.search(r"Used ([\d.]+)([GM]) of [\d.]+[GM] hbm", str(error))
        if used is None:
            raise
        needed = int(float(used[1]) * (GIB if used[2] == "G" else 2**20))
        return Compiled(case, fits=False, needed=needed, arguments=None)
    total = found["arguments"] + found["temporary"]
    return Compiled(case, fits=True, needed=total, arguments=found["arguments"])


def summary(rows: list[Verdict]) -> str:
    """Return the errors of all steps."""
    errors = sorted(abs(row.predicted / row.compiled.needed - 1) for row in rows)
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


def main() -> None:
    """Compile what is missing, and print the table."""
    parser = command_line("plan_slices", __doc__)
    add = parser.add_argument
    add("--missing", action="store_true", help="compile the steps that are not stored")
    add("--minutes", type=float, default=float("inf"), help="start no step after this time")
    add("--count", type=int, default=50, help="number of steps")
    add("--seed", type=int, default=1, help="seed of the choice of steps")
    options = parser.parse_args()
    os.environ.setdefault("ED_LAYERS_NATIVE", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    rows = read()
    began = time.monotonic()
    if options.missing:
        stored = [row.case for row in rows]
        for case in near_the_limit(options.count, options.seed):
            if case in stored:
                continue
            if time.monotonic() - began > 60 * options.minutes:
                break
            start = time.monotonic()
            rows.append(compiled_step(case))
            store(rows)
            cells = verdict(rows[-1]).cells
            print(" | ".join(cells), f"| {time.monotonic() - start:.0f} s", flush=True)
    if not rows:
        raise SystemExit(f"{RESULTS.name} contains no step: run with --missing")
    verdicts = [verdict(row) for row in rows]
    header = ["slice", "step", "needed / memory", "error", "verdicts"]
    print(table(header, [row.cells for row in verdicts]))
    print(summary(verdicts))


if __name__ == "__main__":
    main()
