"""Two processes complete prompts with one engine and train on them, as one process does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ed_infra.testing import run_processes
from ed_trainers.figures.metrics import read_metrics

from tests.multidevice.online_processes import train

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("several_processes")]

MODULE = ["-m", "tests.multidevice.online_processes"]


def test_two_process_online_training_matches_one_process(tmp_path: Path, record_property) -> None:
    """The first run ends within a generation; the second run continues with its completions."""
    one, two = tmp_path / "one", tmp_path / "two"
    for steps in (3, 6):
        command = [*MODULE, two, str(steps), "0"]
        run_processes(command, tmp_path / f"logs_{steps}", processes=2, devices=4)
    train(one, 6)
    alone, together = (read_metrics(run / "metrics.jsonl") for run in (one, two))
    assert [row["step"] for row in together] == [row["step"] for row in alone] == [*range(1, 7)]
    for name in ("reward", "rollout_tokens", "completions/mean_length", "tokens"):
        np.testing.assert_allclose(
            [row[name] for row in together], [row[name] for row in alone], rtol=1e-6
        )
    assert len({row["reward"] for row in alone}) == 3, "the weights did not change"
    for row in together:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
    losses = np.array([[row["loss"] for row in rows] for rows in (alone, together)])
    worst = np.abs(losses[1] - losses[0]).max()
    assert worst <= 1e-5
    record_property("summary", f"grpo on two processes: losses within {worst:.1e} of one's")


def test_failing_reward_ends_all_processes(tmp_path: Path) -> None:
    run_processes([*MODULE, tmp_path, "6", "2"], tmp_path / "logs", processes=2, devices=4)
    messages = [(tmp_path / f"messages_{i}.txt").read_text() for i in range(2)]
    assert messages[0].startswith(
        "reward function 'Reward' raised ValueError: the judge is unavailable"
    )
    assert messages[1] == f"process 0 failed, so this process ends too: RewardError: {messages[0]}"
