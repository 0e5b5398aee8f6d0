"""Messages of errors have a maximum length."""

import pytest
from ed_infra.errors import (
    MAX_MESSAGE,
    CheckpointError,
    ConfigError,
    EasyDeLError,
    describe_missing_path,
)


@pytest.mark.parametrize("kind", [EasyDeLError, ConfigError, CheckpointError])
def test_long_messages_keep_their_beginning_and_end(kind):
    text = "the key " + "k" * 10**6 + " is there twice"
    message = str(kind(text))
    assert len(message) < MAX_MESSAGE + 100
    assert message.startswith("the key kkk")
    assert message.endswith("kkk is there twice")
    assert "characters are left out" in message
    assert str(kind("short")) == "short"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("runs/grpo", ""),
        ("runs/gpro", "; there is no 'gpro' in runs; did you mean 'grpo'?"),
        ("runs/grpo/model", "; there is no 'model' in runs/grpo"),
        ("runs/grpo/notes/model", "; there is no 'model' in runs/grpo/notes"),
        ("rnus/grpo/model", "; there is no 'rnus' in the working directory; did you mean 'runs'?"),
        ("organization/model", ""),
    ],
)
def test_missing_path_is_described_by_its_first_missing_part(tmp_path, monkeypatch, path, text):
    (tmp_path / "runs/grpo").mkdir(parents=True)
    (tmp_path / "runs/grpo/notes").touch()
    monkeypatch.chdir(tmp_path)
    assert describe_missing_path(path) == text
