"""Reward functions in the user's own files and modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ed_infra.errors import ConfigError
from ed_trainers.rewards import Rewards
from ed_trainers.rewards.rules import text_of
from online_runs import online, words

BREVITY = """
import dataclasses
from {helper} import longest

@dataclasses.dataclass
class Limit:
    words: int = longest

def brevity(completions, **fields):
    return [float(len(text.split()) <= Limit().words) for text in completions]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a run file, a reward file and a helper; another folder is current."""
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "project"
    (folder / "inside").mkdir(parents=True)
    (folder / "helper_of_brevity.py").write_text("longest = 2")
    (folder / "inside/helper_inside.py").write_text("longest = 1")
    (folder / "own_rewards.py").write_text(BREVITY.format(helper="helper_of_brevity"))
    (folder / "inside/more_rewards.py").write_text(BREVITY.format(helper="helper_inside"))
    (folder / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def scored(entry, folders):
    class Asked(SimpleNamespace):
        def __len__(self):
            return len(self.completions)

    texts = ["a", "a b", "a b c"]
    asked = Asked(completions=texts, prompts=texts, completion_ids=texts, fields={})
    return Rewards([entry], folders)(asked)[:, 0].tolist()


@pytest.mark.parametrize("entry", ["own_rewards.py:brevity", "own_rewards:brevity"])
def test_files_and_modules_are_found_in_the_folder_of_the_run_file(project, entry):
    assert scored(entry, [project]) == [1, 1, 0]
    assert Rewards([entry], [project]).names == ("brevity",)


def test_files_are_found_in_folders_below_and_by_absolute_paths(project):
    assert scored("inside/more_rewards.py:brevity", [project]) == [1, 0, 0]
    assert scored(f"{project}/inside/more_rewards.py:brevity", []) == [1, 0, 0]


def test_the_working_directory_is_searched(project, monkeypatch):
    monkeypatch.chdir(project)
    assert scored("own_rewards.py:brevity", []) == [1, 1, 0]


def test_the_error_lists_the_searched_places_and_the_way_out(project, tmp_path):
    places = f"searched: {project}, {tmp_path}/elsewhere"
    with pytest.raises(ConfigError) as error:
        Rewards(["missing.py:f"], [project])
    assert f"there is no file 'missing.py'; {places}. Write path/file.py:function" in str(
        error.value
    )
    with pytest.raises(ConfigError) as error:
        Rewards(["missing:f"], [project])
    assert f"there is no module 'missing'; {places}, and the installed" in str(error.value)


def test_error_in_reward_file_raises_config_error_with_cause(project):
    with pytest.raises(ConfigError, match=r"running .*broken\.py raised ZeroDivisionError"):
        Rewards(["broken.py:f"], [project])
    with pytest.raises(ConfigError, match=r"own_rewards\.py has no 'brevety'"):
        Rewards(["own_rewards.py:brevety"], [project])


@pytest.mark.nightly
def test_equal_rewards_of_all_groups_are_warned_about_after_ten_steps(toy, tmp_path, capsys):
    def same(completions):
        return [0.0] * len(completions)

    given = {"beta": 0.0, "num_iterations": 4, "rewards": [same], "max_training_steps": 8}
    online("grpo", toy.model(), tmp_path / "few", **given).train()
    assert "equal rewards" not in capsys.readouterr().out
    given["max_training_steps"] = 20
    online("grpo", toy.model(), tmp_path / "many", **given).train()
    said = capsys.readouterr().out
    assert (
        said.count("warning: for 12 steps in a row, all completions of each prompt had equal") == 1
    )
    assert "(the last ones: 0)" in said and "a list of messages" in said


def test_text_of_reads_both_shapes_of_completions():
    for completion in ("two words", [{"role": "assistant", "content": "two words"}]):
        assert words([text_of(completion)]) == [2]
