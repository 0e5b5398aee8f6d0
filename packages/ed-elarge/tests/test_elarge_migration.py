"""Files of other programs become run files with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import released_keys
import yaml
from ed_elarge.command.foreign_files import PROGRAMS, convert_foreign_file, format_run_file
from ed_elarge.command.main import app
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.migration.axolotl import AXOLOTL_RULES
from ed_elarge.migration.conversion import KeyRule
from ed_elarge.migration.llama_factory import LLAMA_FACTORY_RULES
from ed_infra.errors import ConfigError
from foreign_files import AXOLOTL, TRL, UNSLOTH
from llama_factory_files import DATASET_INFO, LLAMA_FACTORY
from typer.testing import CliRunner

#: Tool and name of a file -> the tool, and the file.
CASES = {
    f"{tool}: {name}": (tool, case)
    for tool, cases in (
        ("axolotl", AXOLOTL),
        ("trl", TRL),
        ("llamafactory", LLAMA_FACTORY),
        ("unsloth", UNSLOTH),
    )
    for name, case in cases.items()
}


def write_case(name: str, folder: Path) -> Path:
    """Write the file of a case, and the data sets that LLaMA-Factory registers."""
    path = folder / "theirs.yaml"
    path.write_text(CASES[name][1].text)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/dataset_info.json").write_text(json.dumps(DATASET_INFO))
    return path


def read_path(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize("name", CASES)
def test_foreign_file_has_its_values_in_a_valid_run_file(name: str, tmp_path: Path) -> None:
    tool, case = CASES[name]
    conversion = convert_foreign_file(write_case(name, tmp_path))
    assert conversion.program == PROGRAMS[tool].name
    text = format_run_file(conversion, "theirs.yaml", "run.yaml")
    values = yaml.safe_load(text)
    assert {path: read_path(values, path) for path in case.values} == case.values
    assert tuple(conversion.changes) == case.changes
    for key in case.changes:
        assert f"#   {key}: " in text
    run = normalize(nodes.parse_yaml(text, "run.yaml"), require_actions=True)
    assert [action.name for action in run.actions] == ["validate", "train"]
    # Every key of the file is a value, a comment, or neutral.
    source = yaml.safe_load(case.text)
    silent = {
        key
        for key, value in source.items()
        if value not in (None, False) and key not in text and key not in PROGRAMS[tool].rules
    }
    assert not silent or tool == "unsloth"


def test_adapters_of_a_full_run_and_other_devices(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("{base_model: a/b, micro_batch_size: 2, lora_r: 8, datasets: [{path: a/c}]}")
    one = convert_foreign_file(path)
    assert one.values["trainer.total_batch_size"] == 2 and "lora.rank" not in one.values
    assert convert_foreign_file(path, devices=8).values["trainer.total_batch_size"] == 16
    assert convert_foreign_file(path, method="sft").method == "sft"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rate: 1", "name the program"),
        ("[1, 2]", "must have keys and values"),
        ("a: [", "is no YAML"),
        ("base_model: a\nmicro_batch_size: two", "micro_batch_size: 'two' is no number"),
        ("base_model: a\nmicro_batch_size: 0", "no whole number above 0"),
    ],
)
def test_file_that_cannot_be_converted_is_an_error(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        convert_foreign_file(path)


def test_unknown_tool_has_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("learning_rate: 1")
    with pytest.raises(ConfigError, match="unknown tool 'trll'; did you mean 'trl'"):
        convert_foreign_file(path, tool="trll")


def test_values_that_a_run_file_refuses_or_ignores_are_named_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "{model_name_or_path: a/b, dataset_name: a/c, packing: true, beta: 0.1, max_length: -3}"
    )
    conversion = convert_foreign_file(path)
    assert list(conversion.changes) == ["max_length"] and "beta" in conversion.omitted
    assert not {"trainer.beta", "trainer.max_length"} & conversion.values.keys()
    assert "trainer.max_length: -3 is refused" in conversion.changes["max_length"]


def test_reward_functions_of_modules_are_kept_for_the_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "{base_model: a/b, rl: grpo, datasets: [{path: a/c}],"
        " trl: {reward_funcs: [rewards.short, absent], num_generations: 1.5}}"
    )
    conversion = convert_foreign_file(path)
    assert conversion.values["trainer.reward_functions"] == ["rewards:short", "absent"]
    assert "trl.reward_funcs absent" in conversion.changes
    assert "trainer.num_return_sequences" not in conversion.values
    with pytest.raises(ConfigError, match="unknown method 'sftt'; did you mean 'sft'"):
        convert_foreign_file(path, method="sftt")


def test_init_writes_the_file_and_its_exit_code_tells_of_missing_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    write_case("axolotl: lora chats", tmp_path)
    result = runner.invoke(app, ["init", "--from", "theirs.yaml"])
    assert result.exit_code == 0 and "wrote theirs-elarge.yaml" in result.output
    assert (tmp_path / "elarge.schema.json").is_file()
    result = runner.invoke(app, ["init", "--from", "theirs.yaml"])
    assert result.exit_code == 2
    write_case("axolotl: alpaca and older keys", tmp_path)
    result = runner.invoke(app, ["init", "--from", "theirs.yaml", "-o", "other.yaml"])
    assert result.exit_code == 1 and "missing keys that matter: 3" in result.output
    assert "unknown_key" in (tmp_path / "other.yaml").read_text()
    assert runner.invoke(app, ["init"]).exit_code == 2
    assert runner.invoke(app, ["init", "sft", "--devices", "2"]).exit_code == 2


def test_run_files_of_local_rows_pass_the_dry_run(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows * 8)))
    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n' * 8)
    for number, text in enumerate(
        (
            f"{{base_model: '{quickstart_model}', micro_batch_size: 2, adapter: lora, "
            "sequence_len: 32, datasets: [{path: rows.jsonl, type: chat_template}]}",
            f"{{model_name_or_path: '{quickstart_model}', use_peft: true, packing: false, "
            "max_length: 32, datasets: [{path: json, data_files: rows.jsonl}]}",
            f"{{model_name_or_path: '{quickstart_model}', max_length: 32, "
            "dataset_name: texts.jsonl}",
        )
    ):
        path = tmp_path / f"theirs{number}.yaml"
        path.write_text(text)
        runner = CliRunner()
        assert (
            runner.invoke(app, ["init", "--from", str(path), "-o", "run.yaml", "--force"]).exit_code
            == 0
        )
        result = runner.invoke(app, ["run", "run.yaml", "--dry-run"])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("names", "rules"),
    [(released_keys.AXOLOTL, AXOLOTL_RULES), (released_keys.LLAMA_FACTORY, LLAMA_FACTORY_RULES)],
    ids=["axolotl", "llama-factory"],
)
def test_every_key_of_a_released_program_has_a_rule(names: str, rules: dict[str, KeyRule]) -> None:
    assert set(names.split()) - rules.keys() == set()
    assert [key for key in rules if len(key) < 2] == []


def test_dft_of_llama_factory_is_the_loss_of_sft(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "{model_name_or_path: a/b, stage: sft, dataset: a/c, template: empty, use_dft_loss: true}"
    )
    converted = convert_foreign_file(path)
    assert converted.values["trainer.loss_type"] == "dft"
    assert "use_dft_loss" not in converted.changes
