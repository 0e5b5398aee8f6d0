"""What `elarge` understands without a manual: the tour, near commands, `explain`, and sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ed_elarge.command import serving
from ed_elarge.command.key_search import list_all_names
from ed_elarge.command.main import _FileFirst, app
from ed_elarge.config.templates import find_template
from ed_elarge.model import eLargeModel
from ed_esurge.command.foreign_flags import FOREIGN_FLAGS
from ed_esurge.command.main import _Esurge
from ed_esurge.command.main import app as esurge
from ed_infra.errors import ConfigError
from run_files import with_changes
from typer.testing import CliRunner


def show(*words: str, program: Any = app) -> tuple[int, str]:
    done = CliRunner().invoke(program, list(words))
    return done.exit_code, done.output


def explain(*words: str) -> dict[str, Any]:
    return json.loads(show("explain", *words, "--json")[1])


@pytest.mark.parametrize(("program", "name"), [(app, "elarge"), (esurge, "esurge")])
def test_program_without_words_prints_a_tour_of_five_commands(program: Any, name: str) -> None:
    code, text = show(program=program)
    assert code == 0
    assert len([line for line in text.splitlines() if line.startswith(f"  {name} ")]) == 5
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (app, ("srve", "x"), "'srve' is no command and no run file; did you mean 'serve'?"),
        (app, ("finetune",), "use `elarge train FILE`"),
        (app, ("xyzzyx",), "the commands are run, train"),
        (app, ("bench", "decod"), "did you mean 'decode'?"),
        (esurge, ("srve",), "'srve' is no command; did you mean 'serve'?"),
        (esurge, ("train", "a.yaml"), "use `elarge train FILE`"),
        (esurge, ("bnech",), "did you mean 'bench'?"),
    ],
)
def test_mistyped_command_is_answered_with_a_command(
    program: Any, words: tuple[str, ...], message: str
) -> None:
    code, text = show(*words, program=program)
    assert (code, message in text) == (2, True), text


def test_other_words_name_no_command() -> None:
    for group, program in ((_FileFirst, app), (_Esurge, esurge)):
        commands = {one.name for one in program.registered_commands}
        assert not commands & group.other_words.keys()


def test_hidden_commands_are_not_suggested() -> None:
    assert "serve-model" not in show("serve-modle")[1]


@pytest.mark.parametrize(
    ("name", "key", "fact"),
    [
        ("learning_rate", "trainer.learning_rate", "bounds: above 0, at most 1e+12"),
        ("--max-model-len", "esurge.max_model_len", "flag: --max-model-len"),
        ("max_model_len", "esurge.max_model_len", "type: int"),
        ("--port", "actions.serve.port", "bounds: at least 0, at most 65535"),
        ("-tp", "--tensor-parallel-size of `esurge serve`", "type: int | null"),
        ("--tensor-parallel-size", "--tensor-parallel-size of `esurge serve`", "type: int | null"),
        ("--gpu-memory-utilization", "esurge.hbm_utilization", "bounds: above 0, at most 1"),
        ("max_steps", "trainer.max_training_steps", "documented: docs/yaml.md, trainer"),
        ("kl_coef", "trainer.beta", "other names: kl_coef"),
        ("data_files", "mixture.informs.data_files", "documented: docs/yaml.md, mixture.informs"),
        ("attn_mechanism", "base_config.values.attn_mechanism", "default: auto"),
        ("dpo", "trainer.trainer_type: dpo", "documented: docs/yaml.md, trainer (trainer_type: d"),
        ("seed", "mixture.seed", "elsewhere: Hugging Face: data_seed; EasyDeL: shuffle_seed_train"),
    ],
)
def test_explain_finds_a_name_without_its_section(name: str, key: str, fact: str) -> None:
    explanations = {one["key"]: one for one in explain(name)["keys"]}
    assert explanations.keys() >= {key}
    fact_name, _, value = fact.partition(": ")
    assert str(explanations[key][fact_name]).startswith(value)


@pytest.mark.parametrize(
    ("name", "program", "place"),
    [
        ("per_device_train_batch_size", "Hugging Face", "total_batch_size"),
        ("use_peft", "TRL", "the section lora"),
        ("sample_packing", "Axolotl", "mixture: {pack_tokens: true"),
        ("--enforce-eager", "vLLM", "without effect"),
        ("--ctx-size", "llama.cpp", "--max-model-len"),
        ("-c", "llama.cpp", "--max-model-len"),
    ],
)
def test_explain_places_the_names_of_other_programs(name: str, program: str, place: str) -> None:
    found = explain(name)
    assert not found["keys"]
    assert [one["place"].startswith(place) for one in found["foreign"] if one["program"] == program]


def test_explain_knows_every_flag_of_other_servers() -> None:
    names = list_all_names()
    for flag in FOREIGN_FLAGS:
        assert all(name.lstrip("-") in names for name in flag.names if name.startswith("--"))


def test_explain_lists_near_names() -> None:
    assert "near names: learning_rate, " in explain("learning_rat")["error"]
    assert "near names: max_model_len" in explain("--max-model-lenn")["error"]
    assert explain("q" * 5000)["error"].startswith("there is no key")


def test_template_has_several_words() -> None:
    words = ("RL", "fine-tune", "lora", "qlora", "pretrain", "server", "preferences")
    expected = ["grpo", "lora", "lora", "qlora", "pretrain", "serve", "dpo"]
    assert [*map(find_template, words)] == expected
    with pytest.raises(ConfigError, match="did you mean 'lora'"):
        find_template("loar")


@pytest.mark.parametrize(
    ("words", "routed"),
    [
        ("serve m.gguf --port 1", "serve-model m.gguf --port 1"),
        ("serve package:a/b.gguf", "serve-model package:a/b.gguf"),
        ("serve --port 8 run.yaml", "serve -- run.yaml --port 8"),
        ("serve r.yml --set a=b --dry-run -tp 2", "serve --set a=b --dry-run -- r.yml -tp 2"),
        ("serve --also x y --port 3 run.json", "serve -- run.json --also x y --port 3"),
        ("serve -c 4096 run.yaml", "serve -- run.yaml -c 4096"),
        ("serve run.yaml --quiet --json", "serve --quiet --json -- run.yaml"),
        ("serve model --json", "serve-model model --json"),
        ("serve --config flags.yaml model", "serve-model --config flags.yaml model"),
        ("serve -m m.gguf -c 4096", "serve-model -m m.gguf -c 4096"),
        ("chat run.yaml --temperature 0", "chat -- run.yaml --temperature 0"),
        ("chat org/name --system Hi", "chat-model org/name --system Hi"),
        ("serve --help", "serve --help"),
        ("chat", "chat"),
    ],
)
def test_source_decides_whether_the_engine_takes_over(words: str, routed: str) -> None:
    assert " ".join(serving.route_words(words.split())) == routed


@pytest.mark.parametrize("wrapper", ["", "elm"])
def test_flags_of_serve_replace_values_of_a_run_file(tmp_path: Path, wrapper: str) -> None:
    run = {**with_changes(), "actions": ["train", {"serve": {"port": 1, "log_level": "error"}}]}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({wrapper: run} if wrapper else run))
    flags = ["--port", "9", "-a", "mine", "--max-model-len", "77"]
    code, text = show("serve", str(file), *flags, "--dry-run")
    assert code == 0, text
    for line in ("port: 9", "- mine", "log_level: error", "max_model_len: 77"):
        assert f"  {line}" in text
    code, text = show("serve", str(file), "--dtype", "float32", "--dry-run")
    assert (code, "use --set loader.dtype=VALUE" in text) == (2, True)
    code, text = show("serve", str(file), "--prt", "9", "--dry-run")
    assert (code, "--port" in text) == (2, True)


def test_run_file_is_served_with_the_model_that_it_has_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = with_changes()
    values["trainer"] = {"trainer_type": "sft", "save_directory": str(tmp_path / "out")}
    values["lora"] = {"rank": 4}
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**values, "actions": ["train"]}))
    document = serving._read_document(str(file), None, "serve")
    assert document.value["model"] == values["model"]
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "config.json").write_text("{}")
    document = serving._read_document(str(file), None, "serve")
    assert document.value["model"] == {"name_or_path": str(tmp_path / "out" / "model")}
    assert "lora" not in document.value
    assert "has trained" in capsys.readouterr().err
    names = eLargeModel({"model": document.value["model"]})._model_names(tmp_path / "out" / "model")
    assert names == ["out"]
