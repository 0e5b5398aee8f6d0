"""The action `serve`: its files are checked early, and its options reach the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ed_esurge.server
import pytest
from ed_elarge import eLargeModel
from ed_elarge.evaluation import harness
from ed_elarge.evaluation.harness import add_plain_names
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


def test_results_have_the_names_of_metrics_without_their_filter() -> None:
    """The loop over the results in the documents: `metrics.get("acc", "N/A")`."""
    values = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1}
    graded = {"alias": "b", "exact_match,strict": 0.2, "exact_match,flexible": 0.4}
    results = add_plain_names({"results": {"a": values, "b": graded}, "configs": {}})
    lines = [f"{t}: {m.get('acc', 'N/A')}" for t, m in results["results"].items()]
    assert lines == ["a: 0.5", "b: N/A"]
    assert results["results"]["b"]["exact_match"] == 0.4, "the last filter"
    assert values.items() <= results["results"]["a"].items()
    assert harness.figures(results) == {
        "a": {"acc": 0.5, "acc_stderr": 0.1},
        "b": {"exact_match": 0.4},
    }
