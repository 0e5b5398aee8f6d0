"""A conversation has the same tokens in loader, server, `eSurge.chat`, `generate`, certificate."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ed_data import Mixture, build_loader
from ed_elarge.certify.chats import SHAPES, TOOLS
from ed_elarge.certify.encodings import Encodings
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import ScriptedEngine, byte_tokenizer

CHATML = (
    "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Templates by what they demand.
TEMPLATES = {
    "any order": CHATML,
    "no tools": CHATML[CHATML.index("{% for m") :].replace(
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}{% endfor %}",
        "",
    ),
    "arguments are text": CHATML.replace(
        "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
    ),
    "turns": "{% for m in messages %}{% if m.role == 'system' and not loop.first or "
    "loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('take turns') }}{% endif %}"
    "{% endfor %}" + CHATML,
    "no system": "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}{% endfor %}" + CHATML,
    "parts": CHATML.replace(
        "{{ m.content }}", "{% for p in m.content %}{{ p['text'] }}{% endfor %}"
    ),
}


def has_calls(chat: list[dict]) -> bool:
    return any(message["role"] in ("tool", "function") for message in chat)


def options(chat: list[dict]) -> dict:
    return {"tools": TOOLS} if has_calls(chat) else {}


def loaded(folder: Path, tokenizer, chat: list[dict]) -> list[int]:
    """Return the tokens of a row as the trainer receives it."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"messages": chat, **options(chat)}) + "\n", encoding="utf-8")
    mixture = {
        "informs": [{"data_files": str(file), "content_field": "messages"}],
        "batch_size": 1,
    }
    loader = build_loader(Mixture(**mixture), tokenizer, seq_length=4096)
    batch = loader.batch_at(0)
    count = int(batch["segment_ids"][0].astype(bool).sum())
    return batch["input_ids"][0][:count].tolist()


class Recorder:
    """Records the prompts of a server."""

    def __init__(self, tokenizer) -> None:
        self.ids: list[int] = []
        self.engine = ScriptedEngine(self.reply, tokenizer=tokenizer, max_model_len=2**14)

    def reply(self, ids: list[int], choice: int) -> str:
        self.ids = ids
        return "a"


@pytest.mark.daily("any order", "parts")
@pytest.mark.parametrize("name", TEMPLATES)
def test_shapes_of_conversations_have_equal_tokens_everywhere(name, tmp_path):
    import httpx

    tokenizer = byte_tokenizer(TEMPLATES[name])
    certificate = Encodings(SimpleNamespace(tokenizer=tokenizer, template=ChatTemplate(tokenizer)))
    recorder = Recorder(tokenizer)
    with background(recorder.engine, batch_directory=tmp_path / "batches") as url:
        for shape, chat in SHAPES.items():
            whole = ChatTemplate(tokenizer).token_ids(
                chat, add_generation_prompt=False, **options(chat)
            )
            assert loaded(tmp_path, tokenizer, chat)[: len(whole)] == whole, shape
            assert (
                certificate.encode_with_trainer(chat, **options(chat))[0][: len(whole)] == whole
            ), shape
            prompt = ChatTemplate(tokenizer).token_ids(chat[:-1], **options(chat))
            assert certificate.encode_with_engine(chat[:-1], **options(chat)) == prompt, shape
            if shape == "older call":  # the server requires the ids of calls
                continue
            body = {"messages": chat[:-1], "max_tokens": 1, **options(chat)}
            answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, (shape, answer.text)
            assert recorder.ids == prompt, shape
