"""Compare the verdicts of `elarge plan` with libtpu, for steps near the memory of TPU slices.

    python -m tools.bench.plan_slices              the table of all stored steps; compiles nothing
    python -m tools.bench.plan_slices --missing    compile the steps without figures
    python -m tools.bench.plan_slices --missing --minutes 60

libtpu (`pip install libtpu`) compiles the train step for the slice, which needs no TPU and some
minutes for each step. `docs/slices.json` contains 50 steps, and the figures of the compiler after
each compilation. The steps were drawn at random among those for which the plan of that time
predicted 85 % to 115 % of the memory.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from ed_elarge.plan.buffers import ACCELERATOR
from ed_elarge.plan.devices import GIB, parse

from tools.bench.measure import command_line, table
from tools.bench.plan import predicted
from tools.bench.plan_cases import BASE, Case, run_of
from tools.workspace import ROOT

RESULTS = ROOT / "docs/slices.json"


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
    hardware = parse(compiled.case["topology"], None)
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
        needed = _needed(str(error))
        if needed is None:
            raise
        return Compiled(case, fits=False, needed=needed, arguments=None)
    total = found["arguments"] + found["temporary"]
    return Compiled(case, fits=True, needed=total, arguments=found["arguments"])


def summary(rows: list[Verdict]) -> str:
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


def main() -> None:
    """Compile what is missing, and print the table."""
    parser = command_line("plan_slices", __doc__)
    add = parser.add_argument
    add("--missing", action="store_true", help="compile the steps without figures")
    add("--minutes", type=float, default=float("inf"), help="start no step after this time")
    options = parser.parse_args()
    os.environ.setdefault("ED_LAYERS_NATIVE", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    rows = read()
    began = time.monotonic()
    if options.missing:
        # Steps without a verdict precede those without a number of bytes.
        for place in sorted(range(len(rows)), key=lambda place: rows[place].fits is not None):
            if rows[place].needed is not None:
                continue
            if time.monotonic() - began > 60 * options.minutes:
                break
            start = time.monotonic()
            rows[place] = compiled_step(rows[place].case)
            store(rows)
            cells = verdict(rows[place]).cells
            print(" | ".join(cells), f"| {time.monotonic() - start:.0f} s", flush=True)
    verdicts = [verdict(row) for row in rows if row.fits is not None]
    header = ["slice", "step", "needed / memory", "error", "verdicts"]
    print(table(header, [row.cells for row in verdicts]))
    print(summary(verdicts))


if __name__ == "__main__":
    main()
