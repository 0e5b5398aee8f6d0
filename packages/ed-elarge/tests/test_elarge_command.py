"""The commands of `elarge`: init, schema, explain, diff, --set, include, variables, doctor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ed_elarge import exits
from ed_elarge.actions.provenance import versions
from ed_elarge.command.main import _COMMANDS, ENDLESS, app
from ed_elarge.command.runs import run_file, with_one_action
from ed_elarge.config import nodes
from ed_elarge.config.layers import with_settings
from ed_elarge.config.normalize import normalize
from ed_elarge.config.templates import has_data, list_templates, template
from ed_elarge.errors import InputError
from ed_esurge.command import main as esurge
from ed_esurge.command.main import app as esurge_app
from ed_esurge.command.program import Result, finish, open_output
from run_files import run, small, with_texts
from typer.testing import CliRunner

HEAVY = {"jax", "jaxlib", "flax", "transformers", "datasets", "torch", "lm_eval", "numpy"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def elarge(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("name", list_templates())
def test_template_is_a_valid_run_file_without_warnings(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.yaml").write_text(template(name, "run.yaml"))
    assert run_file("run.yaml", dry_run=True) == 0
    assert not capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [n for n in list_templates() if n not in ("eval", "serve") and has_data(n)]
)
def test_template_runs_on_the_example_data(here: Path, name: str, quickstart_model: Path) -> None:
    (here / "models").mkdir()
    for model in ("student", "teacher", "mine"):
        (here / "models" / model).symlink_to(quickstart_model)
    Path("run.yaml").write_text(template(name, "run.yaml"))
    assert run_file("run.yaml") == 0


def test_init_writes_a_file_and_its_schema_and_keeps_existing_files(here: Path) -> None:
    code, out, _ = elarge("init", "sft")
    assert code == 0
    assert "elarge sft.yaml --dry-run" in out
    head = Path("sft.yaml").read_text().splitlines()[0]
    assert head == "# yaml-language-server: $schema=elarge.schema.json"
    assert json.loads(Path("elarge.schema.json").read_text())["properties"]["trainer"]
    code, _, err = elarge("init", "sft")
    assert code == 2
    assert "--force" in err
    code, _, err = elarge("init", "sftt")
    assert code == 2
    assert "did you mean 'sft'" in err


def test_schema_accepts_templates_and_refuses_unknown_keys() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    code, out, _ = elarge("schema")
    assert code == 0
    validator = jsonschema.Draft202012Validator(json.loads(out))
    for name in list_templates():
        errors = [*validator.iter_errors(nodes.parse_yaml(template(name, "x")).value)]
        assert not errors, (name, errors[:2])
    for file in (Path(__file__).parents[3] / "examples").glob("*.yaml"):
        errors = [*validator.iter_errors(nodes.read_yaml(file).value)]
        assert not errors, (file, errors[:2])
    for broken in ({"trainer": {"learning_ratee": 1}}, {"trainr": {}}, {"actions": ["trian"]}):
        assert [*validator.iter_errors(broken)]


def test_explain_prints_the_key_of_each_method() -> None:
    code, out, _ = elarge("explain", "trainer.beta")
    assert code == 0
    assert "trainer.beta (ppo)" in out
    assert "other names: kl_coef" in out
    assert "default: 11556" in elarge("explain", "actions.serve.port")[1]
    assert "default: auto" in elarge("explain", "base_config.values.attn_mechanism")[1]
    assert "type: str" in elarge("explain", "mixture.informs.0.split")[1]
    assert "keys: " in elarge("explain", "lora")[1]
    code, _, err = elarge("explain", "trainer.betta")
    assert code == 2
    assert "did you mean 'beta'" in err


def test_diff_prints_resolved_values_that_differ(here: Path) -> None:
    Path("a.yaml").write_text("trainer: {trainer_type: sft, learning_rate: 1e-4}\n")
    Path("b.yaml").write_text("trainer: {trainer_type: sft, seed: 42}\n")
    code, out, _ = elarge("diff", "a.yaml", "b.yaml")
    assert code == 1
    assert out == "trainer.learning_rate: 0.0001 -> 2e-05\n"
    code, out, _ = elarge("diff", "a.yaml", "b.yaml", "--set", "trainer.learning_rate=2e-5")
    assert (code, out) == (0, "")


def test_set_changes_values_and_errors_name_the_setting() -> None:
    document = nodes.parse_yaml(
        "trainer: {seed: 1}\nmixture: {informs: [{data_files: a.txt}]}", "r"
    )
    settings = ["trainer.seed=3", "mixture.informs.0.num_rows=5", "loader.dtype=bf16"]
    changed = normalize(with_settings(document, settings, nodes.parse_yaml))
    assert changed.trainer is not None
    assert changed.mixture is not None
    assert (changed.trainer.seed, changed.mixture.informs[0].num_rows) == (3, 5)
    assert changed.loader.dtype == "bfloat16"
    document = nodes.parse_yaml("trainer: {seed: 1}", "r")
    with pytest.raises(InputError, match=r"--set:1:1: trainer\.seeed: unknown key 'seeed'"):
        normalize(with_settings(document, ["trainer.seeed=3"], nodes.parse_yaml))
    with pytest.raises(InputError, match=r"--set:1:14: trainer\.seed: .*\n.*trainer\.seed=-1"):
        normalize(with_settings(document, ["trainer.seed=-1"], nodes.parse_yaml))
    for wrong in ("trainer.seed", "=3", "trainer.seed.x=3"):
        with pytest.raises(InputError):
            with_settings(document, [wrong], nodes.parse_yaml)


def test_include_completes_a_file_and_errors_name_the_included_file(here: Path) -> None:
    (here / "base").mkdir()
    Path("base/base.yaml").write_text("trainer: {seed: 1, log_steps: 3}\nactions: [train]\n")
    Path("run.yaml").write_text("include: base/base.yaml\ntrainer: {seed: 2}\n")
    assert nodes.read_yaml("run.yaml").value["trainer"] == {"seed": 2, "log_steps": 3}
    Path("base/base.yaml").write_text("trainer:\n  log_stepss: 3\n")
    with pytest.raises(InputError, match=r"base\.yaml:2:3: trainer\.log_stepss: unknown key"):
        normalize(nodes.read_yaml("run.yaml"))
    Path("base/base.yaml").write_text("include: ../run.yaml\n")
    with pytest.raises(InputError, match="the file includes itself"):
        nodes.read_yaml("run.yaml")
    Path("run.yaml").write_text("include: absent.yaml\n")
    with pytest.raises(InputError, match=r"run\.yaml:1:10: include: no such file: absent\.yaml"):
        nodes.read_yaml("run.yaml")


def test_variables_of_the_environment_have_types_and_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SEED", "7")
    monkeypatch.delenv("ABSENT", raising=False)
    text = "a: ${env:SEED}\nb: 'x${env:SEED}'\nc: '${env:SEED}'\nd: ${env:ABSENT:-off}\n"
    assert nodes.parse_yaml(text).value == {"a": 7, "b": "x7", "c": "7", "d": "off"}
    with pytest.raises(InputError, match="variable ABSENT is not set"):
        nodes.parse_yaml("a: ${env:ABSENT}\n")


def test_command_of_an_action_keeps_its_parameters_and_locations() -> None:
    text = "actions:\n  - train\n  - serve:\n      prt: 1\n"
    document = with_one_action(nodes.parse_yaml(text, "r"), "serve")
    assert document.value["actions"] == [{"serve": {"prt": 1}}]
    with pytest.raises(InputError, match=r"r:4:7: actions\[0\]\.serve\.prt: unknown key"):
        normalize(document)
    plain = with_one_action(nodes.parse_yaml("actions: [train]", "r"), "eval")
    assert plain.value["actions"] == ["eval"]


@pytest.mark.parametrize(
    "words",
    [
        [["--help"], [], ["schema"], ["explain", "learning_rate"], ["init", "lora"]],
        [["diff", "a.yaml", "a.yaml"], ["explain", "--port"], ["plan", "--help"], ["init", "dpo"]],
    ],
    ids=["about words", "about files"],
)
@pytest.mark.daily("about words")
def test_commands_about_files_import_neither_jax_nor_transformers(
    here: Path, words: list[list[str]]
) -> None:
    Path("a.yaml").write_text(template("sft", "a.yaml"))
    code = (
        "import sys\nfrom ed_elarge.command.main import app\n"
        f"for one in {words!r}:\n    app(one, standalone_mode=False)\n"
        f"print('HEAVY', sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_commands_print_warnings_of_every_package() -> None:
    names = ["easydel.ed_esurge.engine", "easydel.ed_models", "ed_data", "ed_esurge.server"]
    code = (
        "import logging\nfrom ed_elarge.exits import run_work\n"
        f"run_work(lambda: [logging.getLogger(n).warning('of %s', n) for n in {names!r}] and 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"of {name}" for name in names]


def test_version_and_completion_are_available() -> None:
    code, out, _ = elarge("--version")
    assert (code, out) == (0, f"elarge {versions()['ed-elarge']}\n")
    environment = {**os.environ, "_ELARGE_COMPLETE": "complete_bash", "COMP_WORDS": "elarge ini"}
    environment["COMP_CWORD"] = "1"
    command = [sys.executable, "-c", "from ed_elarge.command.main import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "init" in done.stdout


_BENCH = ("attention", "decode", "limits", "train")


@pytest.mark.parametrize(
    "words", [*((name,) for name in _COMMANDS), *(("bench", name) for name in _BENCH)], ids=" ".join
)
def test_every_command_has_help_and_the_common_options(words: tuple[str, ...]) -> None:
    code, out, _ = elarge(*words, "--help")
    assert code == 0
    assert f"{' '.join(words)} [OPTIONS]" in out
    assert "--verbose" in out
    has_result = words[0] not in ENDLESS
    assert [flag in out for flag in ("--quiet", "--json")] == [has_result, has_result]


#: Flags and arguments with several meanings; each command states its own.
_SEVERAL_MEANINGS = {
    *("--config", "--devices", "--dry-run", "--dtype", "--output", "--seed"),
    *("--served-model-name", "--tokenizer", "FIRST", "MODEL", "SOURCE", "TARGET"),
}


def list_parameters(program: str, command: Any) -> Iterator[tuple[str, str, str]]:
    """Yield command, name and help of each option and argument of a program."""
    commands = getattr(command, "commands", None)
    for name, inner in (commands or {}).items():
        if not inner.hidden:
            yield from list_parameters(f"{program} {name}", inner)
    if commands is None:
        yield program, "", command.help
        for one in command.get_params(typer.Context(command)):
            if not getattr(one, "hidden", False):
                is_option = one.param_type_name == "option"
                yield program, one.opts[0] if is_option else str(one.metavar), one.help or ""


def test_options_of_both_programs_have_one_sentence_per_name() -> None:
    sentences: dict[str, set[str]] = {}
    for program, application in (("elarge", app), ("esurge", esurge_app)):
        group = typer.main.get_command(application)
        for command, name, text in list_parameters(program, group):
            sentence = text.partition("  [")[0].strip()
            assert re.match("[A-Z`(]", sentence), f"{command} {name}: {sentence!r}"
            assert sentence.partition("\n\n")[0].rstrip(")").endswith("."), (command, name)
            sentences.setdefault(name, set()).add(sentence)
    del sentences[""]
    different = {name: texts for name, texts in sentences.items() if len(texts) > 1}
    assert set(different) == _SEVERAL_MEANINGS, different


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["trian", "run.yaml"], "did you mean 'train'?"),
        (["init", "loar"], "did you mean 'lora'?"),
        (
            ["init", "--from", "axolotl.yml"],
            "axolotl.yml: no such file; did you mean 'axolotl.yaml'?",
        ),
        (["launch", "run.yaml", "--on", "slrum"], "did you mean 'slurm'?"),
        pytest.param(
            ["join", "host:1", "--as", "engin"],
            "did you mean 'engine'?",
            marks=pytest.mark.nightly,  # imports jax
        ),
        (["plan", "run.yaml", "--device", "4090"], "(Possible options: --devices)"),
        (["bench", "atention"], "did you mean 'attention'?"),
        (["explain", "learningrate"], "near names: learning_rate"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistyped_words_have_a_suggestion(here: Path, words: list[str], error: str) -> None:
    Path("runs/grpo").mkdir(parents=True)
    Path("axolotl.yaml").touch()
    Path("run.yaml").write_text("trainer: {trainer_type: sft}\n")
    code, out, err = elarge(*words)
    assert (code, out) == (2, "")
    assert error in " ".join(err.split())


def test_json_is_one_object_for_results_and_errors(here: Path) -> None:
    Path("b.yaml").write_text("trainer: {trainer_type: sft, seed: 7}\n")
    results = {}
    for words, code, key in (
        (("init", "sft"), 0, "path"),
        (("init", "dpoo"), 2, "error"),
        (("schema",), 0, "properties"),
        (("explain", "trainer.beta"), 0, "keys"),
        (("explain", "lora"), 0, "keys"),
        (("explain", "base_config.values.attn_mechanism"), 0, "keys"),
        (("explain", "trainer.betta"), 2, "error"),
        (("diff", "sft.yaml", "b.yaml"), 1, "differences"),
        (("diff", "sft.yaml", "absent.yaml"), 2, "error"),
        (("sft.yaml", "--dry-run"), 0, "config"),
        (("train", "sft.yaml", "--dry-run"), 0, "warnings"),
        (("sft.yaml", "--dry-rum"), 2, "error"),
        (("trainn",), 2, "error"),
        (("merge", "a"), 2, "error"),
    ):
        done_code, out, _ = elarge(*words, "--json")
        results[words] = json.loads(out)
        assert (done_code, key in results[words]) == (code, True), (words, out)
    assert results["diff", "sft.yaml", "b.yaml"]["differences"]["trainer.seed"][1] == 7
    assert results["explain", "trainer.beta"]["keys"][0]["type"] == "float"
    assert results["train", "sft.yaml", "--dry-run"]["config"]["actions"] == ["train"]
    assert "did you mean 'train'" in results[("trainn",)]["error"]


def test_quiet_keeps_results_and_errors(here: Path) -> None:
    Path("a.yaml").write_text("trainer: {trainer_type: sft, learning_rate: 1e-4}\n")
    Path("b.yaml").write_text("trainer: {trainer_type: sft}\n")
    line = "trainer.learning_rate: 0.0001 -> 2e-05\n"
    assert elarge("diff", "a.yaml", "b.yaml") == (1, line, "1 values differ\n")
    assert elarge("diff", "a.yaml", "b.yaml", "--quiet") == (1, line, "")
    code, out, err = elarge("explain", "trainer.betta", "--quiet")
    assert (code, out) == (2, "") and err.startswith("error: there is no key")


@pytest.mark.parametrize("run", [exits.run_work, esurge.run_work])
def test_interrupted_command_with_json_prints_an_object(
    run: Callable[[Callable[[], int]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> int:
        print("progress")
        raise KeyboardInterrupt

    with open_output(is_quiet=False, is_json=True):
        assert run(interrupt) == 130
    printed = capsys.readouterr()
    assert (json.loads(printed.out), printed.err) == ({"error": "interrupted"}, "progress\n")


def test_numbers_that_are_not_finite_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    with open_output(is_quiet=True, is_json=True):
        assert finish(Result({"loss": float("nan"), "file": Path("a"), "pair": (1, 2.5)}, 3)) == 3
    assert json.loads(capsys.readouterr().out) == {"loss": None, "file": "a", "pair": [1, 2.5]}


@pytest.mark.nightly
def test_run_with_json_prints_the_figures_of_its_summary(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(small(with_texts(tmp_path))))
    code, out, err = elarge(str(file), "--json")
    assert code == 0, err
    result = json.loads(out)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {key: result[key] for key in summary} == summary
    assert result["metrics"]["steps"] == 3 and Path(result["model"]).is_dir()
    assert "step 1/3" in err
    code, out, err = elarge("generate", str(file), "--quiet")
    assert code == 0, err
    assert out.startswith("--- 'The ' continues:")


@pytest.mark.nightly
def test_run_writes_its_configuration_versions_and_seeds(tmp_path: Path) -> None:
    settings: dict[str, Any] = small(with_texts(tmp_path), actions=["train"])
    assert run(settings) == 0
    facts = json.loads((tmp_path / "run/environment.json").read_text())
    assert facts["versions"] == versions()
    assert facts["seeds"]["trainer"] == 42
    saved = (tmp_path / "run/config.yaml").read_text()
    assert yaml.safe_load(saved)["trainer"]["max_training_steps"] == 3
    changes = {"save_directory": str(tmp_path / "other"), "seed": 7}
    settings["trainer"] = {**settings["trainer"], **changes}
    assert run(settings) == 0
    code, out, _ = elarge("diff", "--run", str(tmp_path / "run"), str(tmp_path / "other"))
    assert code == 1
    assert "environment.seeds.trainer: 42 -> 7" in out
    assert "environment.versions" not in out


@pytest.mark.nightly
def test_checkpoint_commands_convert_quantize_and_compare(
    tmp_path: Path, quickstart_model: Path
) -> None:
    model, stream, again = str(quickstart_model), str(tmp_path / "s"), str(tmp_path / "again")
    assert elarge("convert", model, stream, "--easylm")[0] == 0
    assert elarge("convert", stream, again, "--config", model)[0] == 0
    code, out, _ = elarge("compare", model, again)
    assert (code, out) == (0, "equal\n")
    code, _, err = elarge("quantize", model, str(tmp_path / "small"), "--method", "int8")
    assert code == 0, err
    assert (tmp_path / "small/tokenizer.json").is_file()
    assert elarge("compare", model, str(tmp_path / "small"))[0] == 1
    assert elarge("quantize", model, str(tmp_path / "small"))[0] == 2  # not empty


@pytest.mark.nightly
def test_merge_adds_the_adapter_to_the_weights(tmp_path: Path, quickstart_model: Path) -> None:
    from ed_infra.specs import LoraSpec
    from ed_models import AutoEasyDeLModelForCausalLM

    model = AutoEasyDeLModelForCausalLM.from_pretrained(quickstart_model)
    model.apply_lora(LoraSpec(rank=2), seed=0).save_pretrained(tmp_path / "adapter")
    target = tmp_path / "merged"
    code, _, err = elarge("merge", str(quickstart_model), str(tmp_path / "adapter"), str(target))
    assert code == 0, err
    # A new adapter is zero: the merged weights are those of the base.
    assert elarge("compare", str(quickstart_model), str(target))[0] == 0


def test_doctor_lists_model_types_without_a_family() -> None:
    code, out, _ = elarge("doctor", "--families", "--json")
    missing = json.loads(out)["missing"]["causal language models"]
    assert code == 0
    assert "xlnet" in missing
    assert "llama" not in missing


@pytest.mark.nightly
def test_doctor_and_bench_report_this_machine(tmp_path: Path, quickstart_model: Path) -> None:
    code, out, _ = elarge("doctor")
    assert code == 0
    assert "device 0" in out
    assert "writable" in out
    code, out, err = elarge("bench", "attention", "--length", "64", "--rounds", "2")
    assert code == 0, err
    assert "flash_attn2" in out
    file = tmp_path / "run.yaml"
    file.write_text(template("sft", "run.yaml"))
    code, out, err = elarge("bench", "train", str(file), "--steps", "4")
    assert code == 0, err
    assert "tokens/s" in out
    file.write_text(f"model: {{name_or_path: {quickstart_model}}}\nactions: [generate]\n")
    sizes = ["--prompt", "8", "--tokens", "4", "--rounds", "1"]
    code, out, err = elarge("bench", "decode", str(file), *sizes)
    assert code == 0, err
    assert "decoded" in out
    assert "of the memory's speed" in out
    assert "of the speed of products" in out
    code, out, err = elarge("bench", "limits", "--rounds", "1")
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["memory,", *["products,"] * 3]
