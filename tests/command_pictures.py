"""Take the pictures of terminals and reports in `docs/`, from commands that run on this machine.

    uv run python -m tests.command_pictures [--folder docs] [--only NAME]

The commands run in a terminal of 100 columns in a folder with the examples, as a reader types
them. A picture has the last state of the terminal, without the middle of a long output. The server
and the reports are those of docs/tasks/serve.md, lora.md and rewards.md. Needs some minutes; the
times are printed.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from tests.playground import browser, save_picture
from tests.snippets.pages import blocks
from tools.bench.fresh_clone import list_variables, measure_command
from tools.bench.measure import command_line
from tools.workspace import ROOT

COLUMNS, ROWS = 100, 60
#: First and last lines of a picture; of longer outputs the lines between them are left out.
FIRST_LINES, LAST_LINES = 62, 17
ADDRESS = "http://127.0.0.1:11556"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
#: Control sequences that move the cursor or erase a line; colors stay in the text.
_CONTROL = re.compile(r"\x1b\[(\d*)([A-DJKhl])|\x1b\[\?\d+[hl]|\r|\n")
_PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; padding: 14px; background: #f2f4f3; width: max-content }}
pre {{ margin: 0; padding: 14px 18px; border-radius: 8px; background: #14181d; color: #d6dbe0;
  font: 13px/1.38 "DejaVu Sans Mono", monospace }}
</style><pre>{code}</pre>"""


def read_screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after an output, with the colors of their texts."""
    lines, row, start = [""], 0, 0
    for control in [*_CONTROL.finditer(output), None]:
        lines[row] += output[start : control.start() if control else len(output)]
        if control is None:
            break
        start = control.end()
        if control[0] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif control[2] == "A":
            row = max(row - int(control[1] or 1), 0)
        elif control[2] == "K" or (control[0] == "\r" and output[start : start + 1] not in "\r\n"):
            lines[row] = ""
    while lines and not Text.from_ansi(lines[-1]).plain.strip():
        lines.pop()
    return lines


class Terminal:
    """A command in a terminal.

    Args:
        command: the words.
        folder: where the command runs.
    """

    def __init__(self, command: Sequence[str], folder: Path):
        self.output = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        values = {**list_variables(), "PATH": path, "TERM": "xterm-256color"}
        values["COLUMNS"] = str(COLUMNS)
        self.process = subprocess.Popen(
            command, cwd=folder, env=values, stdin=other, stdout=other, stderr=other
        )
        os.close(other)
        self._main = main

    def read(self, until: Callable[[], bool] | None = None, seconds: float = 1800) -> list[str]:
        """Read until the command ends, or until a condition holds; return the shown lines."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until is not None and until()):
            if not select.select([self._main], [], [], 0.2)[0]:
                if self.process.poll() is not None:
                    break
                continue
            try:
                piece = os.read(self._main, 1 << 16)
            except OSError:  # the command has closed the terminal
                break
            self.output += self._decoder.decode(piece)
        return read_screen(self.output)


def draw_terminal(words: str, lines: list[str]) -> str:
    """Return a page in HTML with a command and its output."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS + 20, force_terminal=True)
    console.print(Text(f"$ {words}", style="bold"))
    if len(lines) > FIRST_LINES + LAST_LINES:
        lines = [*lines[:FIRST_LINES], "\x1b[2m[…]\x1b[0m", *lines[-LAST_LINES:]]
    for line in lines:
        text = Text.from_ansi(line)
        for part in text.divide(range(COLUMNS, len(text), COLUMNS)):
            console.print(part, soft_wrap=True)
    code = console.export_html(inline_styles=True, code_format="{code}")
    return _PAGE.format(code=code)


def run_to_end(words: str, folder: Path) -> list[str]:
    """Run a command in a terminal, and return the lines that the terminal shows at its end.

    Raises:
        RuntimeError: the command failed.
    """
    terminal = Terminal(shlex.split(words), folder)

    def work() -> None:
        terminal.read()
        terminal.process.wait(60)

    row = measure_command(words, work)
    print(f"{words}: {row.elapsed:.0f} s, processor {row.processor:.0f} s", flush=True)
    if terminal.process.returncode:
        raise RuntimeError(f"{words} ended with {terminal.process.returncode}:\n{terminal.output}")
    return read_screen(terminal.output)


def serve_and_ask(words: str, folder: Path) -> list[str]:
    """Serve, send requests at the same time, and return what the terminal shows then."""
    terminal = Terminal(shlex.split(words), folder)
    terminal.read(lambda: is_ready() or terminal.process.poll() is not None)
    body = {"messages": [QUESTION], "max_tokens": 32, "temperature": 0}
    deadline = time.monotonic() + 12  # a busy server logs its throughput every ten seconds

    def ask() -> bool:
        httpx.post(f"{ADDRESS}/v1/chat/completions", json=body, timeout=120).raise_for_status()
        return time.monotonic() > deadline

    terminal.read(ask)
    lines = terminal.read(seconds=1)
    terminal.process.send_signal(signal.SIGINT)
    terminal.process.wait(60)
    return lines


def is_ready() -> bool:
    """Return whether the server answers."""
    try:
        return httpx.get(f"{ADDRESS}/health").status_code == 200
    except httpx.TransportError:
        return False


def read_server() -> str:
    """Return the command of docs/tasks/serve.md, in the foreground and with the usual port."""
    block = blocks(ROOT / "docs/tasks/serve.md")[0].body
    words = " ".join(block.replace("\\\n", " ").rstrip("&\n ").split())
    return re.sub(r"--port \d+ ", "", words)


def write_task(name: str, folder: Path) -> None:
    """Write the files of a page of docs/tasks, as its blocks do, without training."""
    page = blocks(ROOT / f"docs/tasks/{name}.md")
    files = [
        block.body for block in page if block.language == "bash" and "elarge" not in block.body
    ]
    subprocess.run(["bash", "-euo", "pipefail", "-c", "".join(files)], cwd=folder, check=True)


def main() -> None:
    """Run the commands, and take the pictures."""
    parser = command_line("tests.command_pictures", __doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--work", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("--only", choices=["training", "serving", "reports"])
    values = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, browser() as open_tab:
        folder = (values.work or Path(name)).absolute()
        shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
        pages: dict[str, tuple[str, int, int]] = {}

        def show(name: str, words: str, lines: list[str]) -> None:
            page = folder / f"{name}.html"
            page.write_text(draw_terminal(words, lines), "utf-8")
            pages[name] = page.as_uri(), 0, 0

        if values.only in (None, "training"):
            words = "elarge examples/quickstart.yaml"
            show("terminal-training", words, run_to_end(words, folder))
        if values.only in (None, "serving"):
            words = read_server()
            show("terminal-serving", words, serve_and_ask(words, folder))
        if values.only in (None, "reports"):
            for task, run in (("lora", "lora"), ("rewards", "grpo")):
                write_task(task, folder)
                run_to_end(f"elarge {run}.yaml", folder)
                pages[f"report-{run}"] = (folder / f"runs/{run}/report.html").as_uri(), 1280, 1100
        for picture, (uri, width, height) in pages.items():
            tab = open_tab(uri, width=width or 900, height=height or 700)
            tab.emulate_media(color_scheme="light")
            body = tab.locator("body") if not width else tab
            save_picture(body, values.folder / f"{picture}.png")


if __name__ == "__main__":
    main()
