"""The action `serve`: its files are checked early, and its options reach the server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ed_esurge.server
import httpx
import pytest
from ed_elarge import eLargeModel
from ed_elarge.building.serving import list_served_models
from ed_elarge.command.main import app
from ed_elarge.config.action_options import ServeOptions
from ed_elarge.config.reference import read_meanings
from ed_elarge.errors import InputError
from ed_elarge.evaluation import harness
from ed_elarge.evaluation.harness import add_plain_names
from ed_esurge.server.options import ServerOptions
from ed_infra.errors import ConfigError
from maximal_run_file import dry_run

TEXT = """
model:
  config: {{model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 4}}
  tokenizer: {{train: {{vocab_size: 300}}}}
mixture:
  informs: [{{type: python, data_files: "pydoc_data.topics:topics"}}]
actions:
  - serve: {{port: 0, mcp_config: {file}}}
"""


def test_missing_file_of_mcp_servers_is_an_error_of_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, error = dry_run(TEXT.format(file="absent.json"))
    assert code == 2
    assert "mcp_config" in error
    assert "no such file: absent.json" in error


def test_action_serve_passes_the_file_of_mcp_servers_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: dict[str, Any] = {}
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"files": {"url": "http://127.0.0.1:1/mcp"}}}))
    monkeypatch.setattr(
        ed_esurge.server, "serve", lambda engine, host, port, **options: passed.update(options)
    )
    monkeypatch.setattr(eLargeModel, "part", lambda self, name: object())
    eLargeModel({"model": {"name_or_path": str(tmp_path)}}).serve(mcp_config=str(file))
    assert passed["mcp_config"] == str(file)


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", ["Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-chat-hf"]),
        ("./my-sft-model", ["my-sft-model", "./my-sft-model"]),
        ("my-sft-model", "my-sft-model"),
        ("/srv/models/secret/tiny", "tiny"),
    ],
)
def test_server_knows_the_name_of_the_run_file(
    written: str, names: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: dict[str, Any] = {}
    monkeypatch.setattr(
        ed_esurge.server, "serve", lambda engine, host, port, **options: passed.update(options)
    )
    monkeypatch.setattr(eLargeModel, "part", lambda self, name: object())
    eLargeModel({"model": {"name_or_path": written}}).serve()
    assert passed["served_model_name"] == names
    eLargeModel({"model": {"name_or_path": written}}).serve(served_model_name="mine")
    assert passed["served_model_name"] == "mine"


def test_keys_of_the_action_are_the_options_of_the_server() -> None:
    """The flags are compared in `test_each_server_option_is_a_flag`."""
    assert ServeOptions.model_fields.keys() == ServerOptions.model_fields.keys()
    assert all(read_meanings(ServeOptions)[name] for name in ServerOptions.model_fields)


RUN = """
model: {{name_or_path: {model}}}
actions:
  - serve: {{port: 0, {keys}}}
"""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("trust_request_chat_template: true, also: [tiny], model_directory: .", ""),
        ("lora_modules: {a: .}, data_parallel_size: 2", ""),
        ("lora_modules: [a=.], keep_alive: 30s", ""),
        ("model_directory: absent", "no such folder: absent"),
        ("lora_modules: {a: absent}", "no such folder: absent"),
        ("lora_modules: {a: .}, also: [tiny]", "lora_modules requires one model"),
        ("also: [tiny], served_model_name: a", "served_model_name requires one model"),
        ("model_memory: 1", "model_memory requires model_directory"),
        ("trust_request_chat_templates: true", "did you mean 'trust_request_chat_template'"),
    ],
)
def test_run_file_sets_options_of_models(
    keys: str, message: str, quickstart_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quickstart_model)
    code, error = dry_run(RUN.format(model=quickstart_model, keys=keys))
    assert (code, message in error) == (2 if message else 0, True), error


def test_models_of_one_server_share_the_memory(quickstart_model: Path) -> None:
    run = {
        "model": {"name_or_path": str(quickstart_model), "tokenizer": str(quickstart_model)},
        "loader": {"dtype": "bfloat16"},
        "esurge": {"gpu_memory_utilization": 0.8, "max_model_len": 64},
    }
    elm = eLargeModel(run)
    models = list_served_models(elm, ServeOptions(also=["org/other", "third"]), "first")
    assert list(models) == ["first", "org/other", "third"]
    shares = [model.config.esurge for model in models.values()]
    assert [round(one.hbm_utilization, 6) for one in shares] == [0.266667, 0.533333, 0.8]
    assert [one.max_model_len for one in shares] == [64] * 3
    other = models["third"].config
    assert other.model is not None
    assert (other.model.name_or_path, other.model.tokenizer) == ("third", None)
    assert other.loader.dtype == "bfloat16"
    with pytest.raises(ConfigError, match="two models have the same name"):
        list_served_models(elm, ServeOptions(also=["first"]), "first")
    (model,) = list_served_models(
        elm, ServeOptions(lora_modules={"a": "x", "b": "y"}), "m"
    ).values()
    assert model.config.esurge.max_loras == 2
    assert list_served_models(elm, ServeOptions(), "m") == {"m": elm}


@pytest.mark.parametrize("flag", ["", "--json", "--quiet"])
def test_run_that_only_serves_prints_its_address(
    flag: str,
    quickstart_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    levels = []

    def serve_at_once(*address: object, on_ready: Any, **options: Any) -> None:
        levels.append(options["log_level"])
        on_ready("http://127.0.0.1:1/v1", ["a", "b"])

    monkeypatch.setattr(ed_esurge.server, "serve", serve_at_once)
    monkeypatch.setattr(eLargeModel, "part", lambda self, name: object())
    monkeypatch.setattr("ed_elarge.actions.execution._prepare", lambda elm: None)
    file = tmp_path / "serve.yaml"
    file.write_text(RUN.format(model=quickstart_model, keys="drain_seconds: 3"))
    with pytest.raises(SystemExit) as end:
        app(["serve", str(file), *([flag] if flag else [])], prog_name="elarge")
    out = capsys.readouterr().out
    assert end.value.code in (0, None)
    assert levels == ["warning" if flag == "--quiet" else "info"]
    if flag == "--json":
        assert json.loads(out) == {"url": "http://127.0.0.1:1/v1", "models": ["a", "b"]}
    else:
        assert "serving at http://127.0.0.1:1/v1 (Ctrl-C stops)\n" in out


SMALL = {"max_model_len": 64, "page_size": 8, "compile_runner": False, "silent_mode": True}


def serve_and_complete(
    model: Path, names: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[str]:
    """Serve a run, and return the name of the model in the answer for each name."""
    answers = []

    def serve_meanwhile(engine: Any, host: str, port: int, **values: Any) -> None:
        with ed_esurge.server.background(engine, host, port, **values) as url:
            for name in names:
                body = {"prompt": "The", "max_tokens": 2, "model": name}
                answer = httpx.post(f"{url}/completions", json=body, timeout=120).json()
                answers.append(answer.get("model", answer))

    monkeypatch.setattr(ed_esurge.server, "serve", serve_meanwhile)
    run = {"model": {"name_or_path": str(model)}, "esurge": SMALL}
    eLargeModel(run).serve(port=0, **options)
    return answers


@pytest.mark.nightly
def test_run_serves_further_models_and_a_directory(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("other", "models/third"):
        shutil.copytree(quickstart_model, tmp_path / folder)
    names = [quickstart_model.parent.name, "other", "third"]
    options = {"also": [str(tmp_path / "other")], "model_directory": str(tmp_path / "models")}
    assert serve_and_complete(quickstart_model, names, monkeypatch, **options) == names


@pytest.mark.nightly
def test_run_serves_an_adapter_by_its_name(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ed_models import AutoEasyDeLModelForCausalLM
    from ed_models.adapters.peft import save_adapter

    model = AutoEasyDeLModelForCausalLM.from_pretrained(str(quickstart_model))
    adapted = model.apply_lora_to_layers(4, ".*q_proj.*")
    save_adapter(adapted, tmp_path / "adapter", base=str(quickstart_model))
    modules = {"mine": str(tmp_path / "adapter")}
    answers = serve_and_complete(quickstart_model, ["mine"], monkeypatch, lora_modules=modules)
    assert answers == ["mine"]


def test_results_have_the_names_of_metrics_without_their_filter() -> None:
    """The loop over the results in the documents: `metrics.get("acc", "N/A")`."""
    values = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1}
    graded = {"alias": "b", "exact_match,strict": 0.2, "exact_match,flexible": 0.4}
    results = add_plain_names({"results": {"a": values, "b": graded}, "configs": {}})
    lines = [f"{t}: {m.get('acc', 'N/A')}" for t, m in results["results"].items()]
    assert lines == ["a: 0.5", "b: N/A"]
    assert results["results"]["b"]["exact_match"] == 0.4, "the last filter"
    assert values.items() <= results["results"]["a"].items()
    assert harness.list_figures(results) == {
        "a": {"acc": 0.5, "acc_stderr": 0.1},
        "b": {"exact_match": 0.4},
    }


def test_model_without_a_tokenizer_is_named_by_its_own_key(
    quickstart_model: Path, tmp_path: Path
) -> None:
    ignored = shutil.ignore_patterns("token*", "special*", "vocab*", "merges*", "chat_template*")
    folder = shutil.copytree(quickstart_model, tmp_path / "model", ignore=ignored)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"model": {"name_or_path": str(folder)}}))
    with pytest.raises(InputError) as raised:
        eLargeModel.from_yaml(file).build_tokenizer()
    assert "model.name_or_path" in str(raised.value)
    assert "model.tokenizer" not in str(raised.value)
