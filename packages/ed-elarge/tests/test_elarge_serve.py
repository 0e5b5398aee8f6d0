"""The action `serve`: its files are checked early, and its options reach the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ed_esurge.server
import pytest
from ed_elarge import eLargeModel
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
