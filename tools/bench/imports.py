"""Measure the cost of imports: seconds and memory, each in a separate process.

    python -m tools.bench.imports                          the packages and their entry points
    python -m tools.bench.imports "import ed_data" --rounds 9

Wall and processor seconds are medians and exclude Python's own start. The peak is the growth of
resident memory. `torch` is hidden: no package needs torch, but `transformers` imports it if it is
installed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from tools.bench.measure import command_line, machine, table

STATEMENTS = (
    *(f"import ed_{name}" for name in ("infra", "layers", "models", "data", "trainers", "esurge")),
    "import ed_elarge",
    "from ed_data import Inform, Mixture; Mixture(informs=[Inform(data_files='a.jsonl')])",
    "from ed_data import build_loader",
    "import ed_data.tokens.worker",
    "from ed_esurge import eSurge",
)
_PROGRAM = """
import sys, time
sys.modules["torch"] = None
from tools.bench.measure import status
before, clock, processor = status("VmHWM"), time.perf_counter(), time.process_time()
{statement}
print(time.perf_counter() - clock, time.process_time() - processor, status("VmHWM") - before)
"""


def cost(statement: str) -> tuple[float, float, int]:
    """Return the wall seconds, the processor seconds and the bytes of a statement."""
    code = _PROGRAM.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    clock, processor, size = done.stdout.split()
    return float(clock), float(processor), int(size)


def main() -> None:
    parser = command_line("imports", __doc__)
    parser.add_argument("statements", nargs="*", default=STATEMENTS)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    rows = []
    for statement in options.statements:
        found = zip(*(cost(statement) for _ in range(options.rounds)), strict=True)
        clock, processor, size = (statistics.median(each) for each in found)
        figures = [f"{clock * 1e3:.0f}", f"{processor * 1e3:.0f}", f"{size / 2**20:.1f}"]
        rows.append([f"`{statement}`", *figures])
    print(table(["", "ms", "processor ms", "peak, MiB"], rows))


if __name__ == "__main__":
    main()
