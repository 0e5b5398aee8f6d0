"""Train a small model to use a tool of an OpenEnv server, and measure held-out questions.

    uv run python -m tools.bench.tool_use --rows                    write the rows of the example
    uv run python -m tools.bench.tool_use --server PYTHON [--asynchronous]

`PYTHON` is the interpreter of an environment with `openenv-core==0.3.0`. The command runs
examples/tool_use: the server, the warm-up, and GRPO. It prints the reward of each fifth of the
steps, the held-out reward with its standard error, and the processor time. Held-out questions have
other items and other sentences than those of the training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.workspace import ROOT

EXAMPLE = ROOT / "examples" / "tool_use"
PORT = 8765
#: Rows of the files.
CHATS, QUESTIONS, HELD_OUT = 24, 96, 20

TRAINING_ITEMS = (
    ("brass", "oak", "blue", "small", "round", "folding", "striped", "heavy"),
    ("lamp", "chair", "mirror", "clock", "basket", "carpet", "kettle", "bench"),
)
HELD_OUT_ITEMS = (
    ("copper", "pine", "green", "large", "square", "antique", "woollen", "light"),
    ("vase", "stool", "shelf", "candle", "pillow", "curtain", "teapot", "drawer"),
)
TRAINING_SENTENCES = (
    "What does the {} cost?",
    "How much is the {}?",
    "Please tell me the price of the {}.",
    "I would like to buy the {}. How much do you want for it?",
    "My sister likes your {}. What is its price?",
    "Is the {} still for sale, and for how much?",
)
HELD_OUT_SENTENCES = (
    "I saw a {} in your window. What do you charge for it?",
    "Could you check what I have to pay for the {}?",
    "How expensive is the {}?",
    "The {} looks nice. Do you know its price?",
    "For a present I need the {}. What would that be?",
)


def draw_questions(
    items: tuple[tuple[str, ...], tuple[str, ...]], sentences: Sequence[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield rows with a question, its item, and the seed of the prices."""
    chance = random.Random(seed)
    for _ in range(count):
        item = f"{chance.choice(items[0])} {chance.choice(items[1])}"
        content = chance.choice(sentences).format(item)
        prompt = [{"role": "user", "content": content}]
        yield {"prompt": prompt, "item": item, "seed": chance.randrange(10**6)}


def build_rows() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each file of the example."""
    chance, chats = random.Random(0), []
    for row in draw_questions(TRAINING_ITEMS, TRAINING_SENTENCES, CHATS, 1):
        call = {"name": "price", "arguments": {"item": row["item"]}}
        price = chance.randint(11, 99)
        messages = [
            *row["prompt"],
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call00000", "type": "function", "function": call}],
            },
            {"role": "tool", "name": "price", "tool_call_id": "call00000", "content": f"{price}"},
            {"role": "assistant", "content": f"It costs {price}."},
        ]
        chats.append({"messages": messages, "tools": [SCHEMA]})
    return {
        "chats.jsonl": chats,
        "questions.jsonl": list(draw_questions(TRAINING_ITEMS, TRAINING_SENTENCES, QUESTIONS, 2)),
        "heldout.jsonl": list(draw_questions(HELD_OUT_ITEMS, HELD_OUT_SENTENCES, HELD_OUT, 3)),
    }


#: The tool as the server describes it.
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Return the price of an item.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}


def write_rows() -> None:
    """Write the files of the example."""
    for name, rows in build_rows().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (EXAMPLE / name).write_text(text, "utf-8")


def start_server(python: str) -> subprocess.Popen[bytes]:
    """Start the server of the example, and return its process when the server answers."""
    command = [python, str(EXAMPLE / "shop_server.py"), str(PORT)]
    path = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    server = subprocess.Popen(command, env=path)
    for _ in range(300):
        if server.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended with code {server.returncode}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                return server
        time.sleep(0.2)
    server.kill()
    raise SystemExit("the server did not start within a minute")


def run_file(name: str, settings: Sequence[str]) -> float:
    """Execute a run file of the example, and return its processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    values = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "ed_elarge", str(EXAMPLE / name), *values]
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def read_log(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of the log of a run."""
    lines = (directory / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the curve of the rewards, and the held-out rewards with their standard errors.

    A held-out question has several completions, whose rewards are 0 or 1. The standard error is
    that of one completion for each question, so it is an upper bound.
    """
    rewards = [row["reward"] for row in rows if "reward" in row]
    size = -(-len(rewards) // 5)
    held_out = {row["step"]: row["eval_reward"] for row in rows if "eval_reward" in row}
    return {
        "rewards": [
            round(statistics.mean(rewards[i : i + size]), 3) for i in range(0, len(rewards), size)
        ],
        "held_out": {
            step: (round(value, 3), round((value * (1 - value) / HELD_OUT) ** 0.5, 3))
            for step, value in held_out.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the rows, or run the example and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true", help="only write the rows")
    parser.add_argument("--server", default=sys.executable, help="interpreter of the server")
    parser.add_argument("--asynchronous", action="store_true", help="sample in another process")
    parser.add_argument("--skip-warm-up", action="store_true", help="use the finished warm-up")
    options = parser.parse_args(arguments)
    if options.rows:
        write_rows()
        return
    os.chdir(ROOT)
    seconds = {}
    server = start_server(options.server)
    try:
        if not options.skip_warm_up:
            seconds["warm_up"] = run_file("warm_up.yaml", ())
        name = "asynchronous" if options.asynchronous else "grpo"
        settings = [f"trainer.save_directory=runs/tool_use/{name}"]
        if options.asynchronous:
            settings.append("asynchronous.max_staleness=1")
        seconds[name] = run_file("grpo.yaml", settings)
    finally:
        server.kill()
    figures = summarize(read_log(Path("runs/tool_use") / name))
    print(json.dumps({**figures, "processor_seconds": seconds}))


if __name__ == "__main__":
    main()
