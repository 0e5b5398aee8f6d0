"""Asynchronous runs: equal to one process without staleness, and exact after any kill."""

import json
import os
import re
import shutil

import numpy as np
import pytest
from ed_data import train_bpe
from ed_trainers.online.sample_ledger import SampleLedger

from tests.rollout.asynchronous_runs import RUN, check_ledger, finish, run_with_kills, steps, write

#: Number of kills of each kill test; 100 in the full form, for two tests.
KILLS = int(os.environ.get("EASYDEL_ASYNCHRONOUS_KILLS", "6"))


@pytest.mark.nightly
def test_run_without_staleness_equals_run_in_one_process(tmp_path):
    alone = finish(write(tmp_path / "alone"))
    apart = finish(write(tmp_path / "apart", "asynchronous: {max_staleness: 0}\n"))
    assert [row["loss"] for row in apart] == [row["loss"] for row in alone]
    assert apart == alone
    check_ledger(tmp_path / "apart")


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [0, 2])
def test_run_with_kills_uses_each_prompt_once_and_its_ledger_replays_it(tmp_path, staleness):
    """The ledger alone, without engines and checkpoints, reproduces all figures bit for bit."""
    section = f"asynchronous: {{max_staleness: {staleness}, engines: 2}}\n"
    text = RUN.replace("max_training_steps: 8", f"max_training_steps: {8 * KILLS}")
    # Kills change the batches of the engines, which must not change the last bits of the numbers.
    text = text.replace("{model_type:", "{batch_invariant: true, model_type:")
    folder = write(tmp_path / "killed", section, text)
    counts = run_with_kills(folder, KILLS, seed=staleness)
    print(f"kills: {counts}")
    lengths = check_ledger(folder, generations=8 * KILLS)
    section = (
        f"asynchronous: {{max_staleness: {staleness}, engines: 0, environment_processes: 0}}\n"
    )
    again = write(tmp_path / "again", section, text)
    (again / "run").mkdir()
    shutil.copy(folder / "run" / "samples.ledger", again / "run")
    shutil.copytree(folder / "run" / "tokenizer", again / "run" / "tokenizer")
    assert finish(again) == steps(folder)
    if staleness == 0:
        alone = finish(write(tmp_path / "alone", text=text))
        assert [row["loss"] for row in steps(folder)] == [row["loss"] for row in alone]
        expected = [row["completions/mean_length"] for row in alone]
        np.testing.assert_allclose(np.reshape(lengths, (len(alone), -1)).mean(1), expected)


@pytest.mark.nightly
def test_other_prompts_or_a_truncated_ledger_are_refused(tmp_path):
    folder = write(tmp_path, "asynchronous: {max_staleness: 1}\n")
    finish(folder)
    ledger = folder / "run" / "samples.ledger"
    data = ledger.read_bytes()
    ledger.write_bytes(data[: len(data) // 2])
    with pytest.raises(AssertionError, match="the checkpoint needs"):
        finish(folder)


#: Replies twice, then ends with a reward for the number of its replies.
ECHO = """
from ed_trainers.environments import EnvironmentReply, Sandbox


class Echo:
    def reset(self, messages, row):
        assert messages == [{"role": "user", "content": messages[0]["content"]}]
        self.count = 0

    def step(self, messages):
        assert messages[-1]["role"] == "assistant" and len(messages) == 2 * self.count + 2
        self.count += 1
        if self.count == 3:
            return EnvironmentReply(reward=0.5, done=True)
        result = Sandbox(seconds=20).python("print(6 * 7)")
        return EnvironmentReply([{"role": "tool", "content": result.output}], reward=0.25)
"""


#: Every fourth token ends a message, so that samples have several of them.
ENDS = f"esurge: {{extra_eos_token_ids: {list(range(3, 270, 4))}}}\n"


@pytest.mark.nightly
def test_environment_in_the_process_of_the_trainer_gives_the_same_run(tmp_path):
    text = RUN.replace("max_completion_length: 24", "max_completion_length: 40")
    text = text.replace("max_training_steps: 8", "max_training_steps: 2")
    environment = "trainer:\n  environment: echo.py:Echo\n  max_turns: 2\n"
    runs = []
    for name, section in (("alone", ""), ("apart", "asynchronous: {max_staleness: 0}\n")):
        folder = write(tmp_path / name, ENDS + section, text.replace("trainer:\n", environment))
        (folder / "echo.py").write_text(ECHO)
        runs.append(finish(folder))
    alone, apart = runs
    assert [row["loss"] for row in apart] == [row["loss"] for row in alone]
    assert alone[0]["rewards/environment/mean"] == apart[0]["rewards/environment/mean"] > 0.25


@pytest.mark.nightly
def test_environment_replies_in_samples_and_its_words_have_no_log_probabilities(tmp_path):
    text = RUN.replace("max_completion_length: 24", "max_completion_length: 40")
    section = ENDS + "asynchronous: {max_staleness: 1, environment: 'echo.py:Echo'}\n"
    folder = write(
        tmp_path, section, text.replace("max_training_steps: 8", "max_training_steps: 2")
    )
    (folder / "echo.py").write_text(ECHO)
    rows = finish(folder)
    check_ledger(folder, generations=2)
    ledger = SampleLedger(folder / "run" / "samples.ledger", {})
    samples = [ledger.sample((0, place)) for place in range(16)]
    ledger.close()
    assert any(len(one.given) == 2 and one.ended for one in samples)
    for one in samples:
        given = [at for first, count in one.given for at in range(first, first + count)]
        assert all(one.logprobs[at] == 0 for at in given)
        assert sum(p != 0 for p in one.logprobs) <= len(one.token_ids) - len(given)
        whole = len(one.given) == 2 and one.ended
        assert one.rewards is not None and one.rewards[-1] == (
            1.0 if whole else 0.25 * (len(one.given) + 1)
        )
    assert "rewards/environment/mean" in rows[0]


TOOLS = """
def look(place: str) -> str:
    \"\"\"
    Look.

    Args:
        place: The place.
    \"\"\"
    return place


def count_messages(completions, **fields):
    return [float(len(messages)) for messages in completions]
"""
TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% for m in messages %}{{ m.content }}<|eos|>{% endfor %}"
)
#: A call that is one token, so that a model with random weights writes calls.
CALL = '<tool_call>{"name": "look", "arguments": {"place": "p%d"}}</tool_call>'


@pytest.mark.nightly
def test_tools_give_the_same_run_with_and_without_other_processes(tmp_path):
    tokenizer = train_bpe(["a b c d"], 300)
    tokenizer.add_tokens([CALL % place for place in range(40)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    ids = list(range(3, len(tokenizer), 4))
    rows = [{"prompt": [{"role": "user", "content": f"b {i}"}]} for i in range(16)]
    text = RUN.replace("max_completion_length: 24", "max_completion_length: 80")
    text = text.replace("{train: {vocab_size: 300}}", f"{{name_or_path: {tmp_path}/tokenizer}}")
    text = text.replace("max_training_steps: 8", "max_training_steps: 2")
    text = text.replace("max_prompt_length: 12", "max_prompt_length: 40")
    text = text.replace("max_position_embeddings: 64", "max_position_embeddings: 128")
    text = text.replace('[{regex: {pattern: "[0-9]"}}]', '["tools.py:count_messages"]')
    text = re.sub(r"data_files: [^,]+", "data_files: rows.jsonl", text)
    more = "trainer:\n  tool_format: hermes\n  tools: tools.py:look\n  max_turns: 3\n"
    runs = []
    for name, section in (("alone", ""), ("apart", "asynchronous: {max_staleness: 0}\n")):
        section += f"esurge: {{extra_eos_token_ids: {ids}}}\n"
        folder = write(tmp_path / name, section, text.replace("trainer:\n", more))
        (folder / "tools.py").write_text(TOOLS)
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        runs.append(finish(folder))
    alone, apart = runs
    assert [row["loss"] for row in apart] == [row["loss"] for row in alone]
    frequencies = [row["tools/call_frequency"] for row in alone]
    assert frequencies == [row["tools/call_frequency"] for row in apart]
    assert min(frequencies) > 0
    assert alone[0]["rewards/count_messages/mean"] == apart[0]["rewards/count_messages/mean"] > 1
