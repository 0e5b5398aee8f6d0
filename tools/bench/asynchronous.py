"""Measure asynchronous training against the synchronous loop: seconds per step, and rewards.

    uv run python -m tools.bench.asynchronous
    uv run python -m tools.bench.asynchronous --steps 40 --staleness 0 1 2

GRPO trains a small Llama on two tasks whose samples have long-tailed lengths: nine of 280 tokens
end a sample, so most samples are short, and the longest of a step has three times the mean length.
Each run starts `elarge` with the same seed, once without the section `asynchronous`, and once for
each staleness. The first steps compile and are not counted. Learning curves are the mean rewards of
five parts of a run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.measure import command_line, machine

ROOT = Path(__file__).parents[2]
#: Name of a task -> its reward, a regular expression.
TASKS = {"two vowels": "[aeiou].*[aeiou]", "three digits": "[0-9].*[0-9].*[0-9]"}
WARM = 4
RUN = """
model:
  config: {{model_type: llama, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 4,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 256}}
  tokenizer: {{train: {{vocab_size: 280}}}}
sharding: {{axis_dims: [1, 1, 1, 1, 1]}}
mixture:
  informs: [{{data_files: {root}/examples/data/answers.jsonl, content_field: prompt}}]
esurge: {{extra_eos_token_ids: [200, 201, 202, 203, 204, 205, 206, 207]}}
trainer:
  trainer_type: grpo
  reward_functions: [{{regex: {{pattern: "{pattern}"}}}}]
  num_return_sequences: 4
  max_prompt_length: 12
  max_completion_length: 192
  max_training_steps: {steps}
  total_batch_size: 16
  learning_rate: 3e-3
  log_steps: 1
  save_directory: run
  do_last_save: false
  use_tensorboard: false
actions: [train]
"""


def rows(pattern: str, steps: int, staleness: int | None) -> list[dict[str, Any]]:
    """Train, and return the rows of the log.

    Args:
        pattern: the reward.
        steps: number of steps.
        staleness: value of `max_staleness`; None: the synchronous loop.
    """
    text = RUN.format(root=ROOT, pattern=pattern, steps=steps)
    if staleness is not None:
        text += f"asynchronous: {{max_staleness: {staleness}}}\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.yaml").write_text(text)
        words = [sys.executable, "-m", "ed_elarge", "run.yaml"]
        environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
        subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def main() -> None:
    """Print a table."""
    parser = command_line("asynchronous", __doc__)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run")
    parser.add_argument("--staleness", type=int, nargs="+", default=[1], help="asynchronous runs")
    options = parser.parse_args()
    print(machine())
    print("| task | run | s/step | against sync | mean (longest) tokens | rewards of fifths |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for task, pattern in TASKS.items():
        alone = 0.0
        for staleness in [None, *options.staleness]:
            found = rows(pattern, options.steps, staleness)
            # The whole time between two steps: a long sample delays only some of them.
            seconds = (found[-1]["time"] - found[WARM - 1]["time"]) / (len(found) - WARM)
            alone = alone or seconds
            fifth = max(len(found) // 5, 1)
            parts = [found[at : at + fifth] for at in range(0, 5 * fifth, fifth)]
            curve = " ".join(f"{statistics.mean(r['reward'] for r in part):.2f}" for part in parts)
            mean = statistics.mean(row["completions/mean_length"] for row in found)
            longest = statistics.mean(row["completions/max_length"] for row in found)
            name = "one process" if staleness is None else f"max_staleness {staleness}"
            cells = [task, name, f"{seconds:.3f}", f"{alone / seconds:.2f}×"]
            print("|", " | ".join([*cells, f"{mean:.0f} ({longest:.0f})", curve]), "|", flush=True)


if __name__ == "__main__":
    main()
