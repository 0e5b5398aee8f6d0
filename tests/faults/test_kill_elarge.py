"""A killed and restarted `elarge run.yaml` repeats no step and has bitwise equal losses.

The data is shuffled and packed. SIGKILL arrives within an epoch, at random steps, and while a
checkpoint is written.
"""

import itertools
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from ed_trainers.figures.metrics import CLOCKED

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
ELARGE = pathlib.Path(sys.executable).with_name("elarge")
STEPS, SAVE_EVERY = 40, 8
RUN = f"""
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}}
  tokenizer: {{train: {{vocab_size: 400}}}}
loader: {{dtype: fp32, param_dtype: fp32}}
sharding: {{axis_dims: [1, 1, 1, 1, 1]}}
mixture:
  informs: [{{type: python, data_files: "pydoc_data.topics:topics", num_rows: 12}}]
  eval_fraction: 0.2
  pack_tokens: true
  pack_seq_length: 64
  seed: 3
trainer:
  trainer_type: sft
  max_training_steps: {STEPS}
  total_batch_size: 4
  learning_rate: 1e-3
  log_steps: 1
  evaluation_steps: 20
  save_steps: {SAVE_EVERY}
  save_directory: run
actions: [train]
"""
#: The same run with adapters on a 4-bit base, which is the model of an earlier run.
NEW, QUANTIZED = (
    "  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,\n"
    "           num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 128}\n"
    "  tokenizer: {train: {vocab_size: 400}}\n",
    "  name_or_path: BASE\n"
    "quantization: {model: {quantization_method: nf4, group_size: 32}}\n"
    "lora: {rank: 4, dropout: 0.1}\n",
)
#: The same data for an encoder, whose masks depend on the step.
MASKED = (
    RUN.replace("llama", "bert")
    .replace(" num_key_value_heads: 2,", "")
    .replace("trainer_type: sft", "trainer_type: mlm\n  whole_word_mask: true")
)
#: Runs of encoders, encoder-decoders and models of speech: data and method of an example.
FROM_EXAMPLES = (
    "token_classification",
    "sequence_classification",
    "embedding",
    "cross_encoder",
    "question_answering",
    "multiple_choice",
    "span_corruption",
    "ctc",
    "whisper",
    "image_classification",
    "contrastive",
    "seq2seq_sft",
    "seq2seq_dpo",
)


def of_example(method):
    """Return a run file that trains the model of an example on its data."""
    example = yaml.safe_load((EXAMPLES / f"{method}.yaml").read_text())
    mixture = example["mixture"]
    for inform in [*mixture["informs"], *mixture.get("eval_informs", [])]:
        if inform.get("type") != "python":
            inform["data_files"] = str(EXAMPLES.parent / inform["data_files"])
    run = yaml.safe_load(RUN)
    changes = {name: run["trainer"][name] for name in run["trainer"] if name != "trainer_type"}
    trainer = {**example["trainer"], **changes}
    sections = {"loader": run["loader"], "sharding": run["sharding"], "actions": run["actions"]}
    return yaml.safe_dump({**example, **sections, "trainer": trainer}, sort_keys=False)


#: Online methods: some checkpoints are within a generation of six steps.
GIVEN = RUN[RUN.index("mixture:") : RUN.index("  max_training_steps")]
SAMPLED = """mixture:
  informs: [{type: python, data_files: "pydoc_data.topics:topics", num_rows: 12,
             content_field: content}]
  eval_fraction: 0.2
  seed: 3
esurge: {page_size: 16}
trainer:
  trainer_type: grpo
  reward_functions: [{regex: {pattern: "[aeiou]"}}]
  max_prompt_length: 16
  max_completion_length: 4
  num_return_sequences: 2
  steps_per_generation: 2
  num_iterations: 3
"""
#: Method -> the part of its run file that differs from `RUN`; ppo also restores a value head.
ONLINE = {
    "grpo": SAMPLED,
    "gfpo": SAMPLED.replace("grpo\n", "gfpo\n  num_remains_in_group: 2\n").replace(
        "num_return_sequences: 2", "num_return_sequences: 3"
    ),
    "sdpo": SAMPLED.replace("grpo\n", "sdpo\n  max_reprompt_len: 32\n"),
    "ppo": SAMPLED.replace("grpo", "ppo").replace("  num_return_sequences: 2\n", ""),
}


def start(folder, text=RUN):
    (folder / "run.yaml").write_text(text)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    environment = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.Popen(
        [ELARGE, "run.yaml"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows_of(folder):
    """Return the metrics without clock times; an incomplete last line is not a row."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in rows]


def different(rows, expected):
    """Return the differences of two records: (line, found, expected), None after the end of one."""
    pairs = enumerate(itertools.zip_longest(rows, expected), 1)
    return [(line, *pair) for line, pair in pairs if pair[0] != pair[1]]


def saved(folder):
    directory = folder / "run" / "checkpoints"
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)


def kill_when(folder, process, condition):
    """Send SIGKILL as soon as the condition holds."""
    for _ in range(60_000):
        assert process.poll() is None, process.communicate()[0]
        if condition():
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def finish(folder, text=RUN):
    process = start(folder, text)
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    return printed


def a_checkpoint_is_being_written(folder):
    directory = folder / "run" / "checkpoints"
    newest = saved(folder) or 0
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return any(
        re.match(r"\d+\D", name) and int(re.match(r"\d+", name)[0]) > newest for name in names
    )


@pytest.fixture(
    scope="module", params=["new", "quantized", "masked", *FROM_EXAMPLES, "grpo", "gfpo", "sdpo"]
)
def run(request, tmp_path_factory):
    """Return a run file, and the record of an uninterrupted run."""
    folder, text = tmp_path_factory.mktemp("uninterrupted"), RUN
    if request.param == "quantized":
        base = tmp_path_factory.mktemp("base")
        finish(base, RUN.replace(f"max_training_steps: {STEPS}", "max_training_steps: 2"))
        text = RUN.replace(NEW, QUANTIZED.replace("BASE", str(base / "run" / "model")))
        assert text != RUN
    if request.param == "masked":
        text = MASKED
    if request.param in FROM_EXAMPLES:
        text = of_example(request.param)
    if request.param in ONLINE:
        text = RUN.replace(GIVEN, ONLINE[request.param])
    finish(folder, text)
    rows = rows_of(folder)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    return text, rows


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_run_killed_three_times_and_while_saving_equals_uninterrupted_run(
    run, tmp_path, record_property
):
    text, uninterrupted = run
    seed = time.time_ns() % 10_000
    kills = sorted(random.Random(seed).sample(range(SAVE_EVERY + 1, STEPS - SAVE_EVERY), 3))
    for step in kills:
        process = start(tmp_path, text)
        kill_when(
            tmp_path,
            process,
            # Checkpoints are written asynchronously: the first may be complete some steps later.
            lambda step=step: saved(tmp_path) and rows_of(tmp_path)[-1]["step"] >= step,
        )
    process = start(tmp_path, text)
    kill_when(tmp_path, process, lambda: a_checkpoint_is_being_written(tmp_path))
    resumed_from = saved(tmp_path)
    printed = finish(tmp_path, text)
    assert f"resumed from step {resumed_from}" in printed
    assert different(rows_of(tmp_path), uninterrupted) == []
    found = f"{len(uninterrupted)} rows equal"
    record_property("summary", f"killed at {kills} and while saving after {resumed_from}: {found}")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("run", "times"), [("grpo", 20), ("ppo", 6)], indirect=["run"])
def test_killed_online_run_equals_uninterrupted_run(run, times, tmp_path, record_property):
    """Every second kill happens while a checkpoint is written, the others after a random step."""
    text, uninterrupted = run
    chance, kills = random.Random(time.time_ns()), []
    for count in range(times):
        process = start(tmp_path, text)
        reached = saved(tmp_path) or 0
        if count % 2 and reached < STEPS - SAVE_EVERY:
            kill_when(tmp_path, process, lambda: a_checkpoint_is_being_written(tmp_path))
            kills.append(f"saving after {reached}")
            continue
        step = min(reached + chance.randint(1, SAVE_EVERY + 5), STEPS - 3)
        # Some kills wait for a complete checkpoint, so that not every start is at step 0.
        least = reached + 1 if count % 4 == 2 and reached < STEPS - 2 * SAVE_EVERY else 0
        began = (tmp_path / "run" / "metrics.jsonl").is_file()
        before = len(rows_of(tmp_path)) if began else 0
        kill_when(
            tmp_path,
            process,
            # The record is truncated to the checkpoint before it grows again.
            lambda step=step, before=before, least=least: (
                len(rows := rows_of(tmp_path)) != before
                and rows
                and rows[-1]["step"] >= step
                and (saved(tmp_path) or 0) >= least
            ),
        )
        kills.append(str(step))
    finish(tmp_path, text)
    assert different(rows_of(tmp_path), uninterrupted) == []
    found = f"{len(uninterrupted)} rows equal"
    method = next(name for name, part in ONLINE.items() if part in text)
    record_property("summary", f"{method} killed at {', '.join(kills)}: {found}")
