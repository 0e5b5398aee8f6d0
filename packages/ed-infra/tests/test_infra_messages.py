"""Messages of errors have a maximum length."""

import pytest
from ed_infra.errors import MAX_MESSAGE, CheckpointError, ConfigError, EasyDeLError


@pytest.mark.parametrize("kind", [EasyDeLError, ConfigError, CheckpointError])
def test_long_messages_keep_their_beginning_and_end(kind):
    text = "the key " + "k" * 10**6 + " is there twice"
    message = str(kind(text))
    assert len(message) < MAX_MESSAGE + 100
    assert message.startswith("the key kkk")
    assert message.endswith("kkk is there twice")
    assert "characters are left out" in message
    assert str(kind("short")) == "short"
