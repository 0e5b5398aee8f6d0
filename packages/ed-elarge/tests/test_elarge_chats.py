"""Training on chats: the chat template of a run, prompts that are conversations, the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ed_elarge import eLargeModel
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.config.table import check_machine
from ed_elarge.errors import InputError
from ed_elarge.evaluation.prompts import question
from run_files import run, small, with_changes

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = [{"role": "user", "content": "2 + 3 ="}]


def with_chats(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds that trains adapters on chats, with a chat template in a file."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{a} + {b} ="},
                {"role": "assistant", "content": str(a + b)},
            ]
        }
        for a in range(8)
        for b in range(8)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "template.jinja").write_text(TEMPLATE)
    settings = small(folder, lora={"rank": 2}, actions=["train", "generate"], **changes)
    settings["model"]["tokenizer"] = {
        "train": {"vocab_size": 300},
        "chat_template": str(folder / "template.jinja"),
    }
    settings["mixture"]["informs"] = [
        {"data_files": str(folder / "chats.jsonl"), "content_field": "messages"}
    ]
    settings["trainer"] |= {
        "generation_interval": 3,
        "generation_prompts": [QUESTION],
        "generation_max_new_tokens": 2,
    }
    return settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that trained on chats; `shown` in it has the output."""
    folder = tmp_path_factory.mktemp("chats")
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: shown.extend(map(str, words)))
        patch.setattr(
            "rich.console.Console.print", lambda self, *words, **_: shown.extend(map(str, words))
        )
        assert run(with_chats(folder)) == 0
    (folder / "run" / "shown").write_text("\n".join(shown))
    return folder / "run"


@pytest.mark.nightly
def test_the_chat_template_of_a_run_is_saved_with_the_model(trained: Path) -> None:
    assert (trained / "model" / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.nightly
def test_a_preview_of_a_conversation_is_rendered_with_the_chat_template(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    samples = next(row["samples"] for row in rows if "samples" in row)
    assert samples[0]["prompt"] == "<user>2 + 3 =<assistant>"


@pytest.mark.nightly
def test_a_sample_after_training_on_chats_asks_a_held_out_question(trained: Path) -> None:
    samples = json.loads((trained / "summary.json").read_text())["samples"]
    assert [message["role"] for message in samples[0]["prompt"]] == ["user"]


@pytest.mark.nightly
def test_the_request_suggested_after_training_on_chats_is_a_chat_request(trained: Path) -> None:
    shown = (trained / "shown").read_text()
    assert "/v1/chat/completions" in shown
    assert '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}' in shown


@pytest.mark.nightly
def test_the_summary_of_a_merged_adapter_names_model_and_adapter(trained: Path) -> None:
    shown = (trained / "shown").read_text()
    assert f"model (Hugging Face layout)  {trained / 'model'}" in shown
    assert f"adapters (PEFT's layout)     {trained / 'adapter'}" in shown


@pytest.mark.nightly
def test_generate_accepts_texts_and_conversations(trained: Path) -> None:
    model = eLargeModel.from_pretrained(str(trained / "model")).update_config(
        {"esurge": {"max_model_len": 64, "max_num_seqs": 2, "compile_runner": False}}
    )
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    asked = model.generate(["2 + 3 =", QUESTION], max_new_tokens=2)
    assert [prompt for prompt, _ in asked] == ["2 + 3 =", tuple(QUESTION)]
    assert model.generate(QUESTION, max_new_tokens=2) == asked[1:]

    # A template without roles leaves the text alone: the conversation is the text.
    model.update_config({"model": {"tokenizer": {"chat_template": template}}})
    ids = model.build_tokenizer().apply_chat_template(QUESTION, return_dict=True)["input_ids"]
    assert ids == model.build_tokenizer().encode("2 + 3 =", add_special_tokens=False)


def test_question_is_the_messages_before_first_answer() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    answer = {"role": "assistant", "content": "a"}
    assert question([system, user, answer, user, answer]) == (system, user)
    assert question([user]) == (user,)


@pytest.mark.parametrize(
    ("tokenizer", "where", "words"),
    [
        (
            {"train": {"vocab_size": 300}, "chat_template": "no/such.jinja"},
            "model.tokenizer.chat_template",
            "'no/such.jinja' cannot be read (No such file or directory)",
        ),
        (
            {"train": {"vocab_size": 300}, "name_or_path": "a/b"},
            "model.tokenizer",
            "name_or_path and train exclude each other",
        ),
        ({"chat_template": "{{ x }}"}, "model", "a new model has none"),
    ],
)
def test_wrong_keys_of_the_tokenizer_are_refused(
    tokenizer: dict[str, Any], where: str, words: str
) -> None:
    import yaml

    text = yaml.safe_dump(with_changes(model__tokenizer=tokenizer))
    with pytest.raises(InputError) as error:
        check_machine(normalize(nodes.parse_yaml(text, "f"), require_actions=True))
    line = next(line for line in str(error.value).splitlines() if words in line)
    assert where in line


def test_a_chat_template_that_is_no_jinja_is_refused(tmp_path: Path) -> None:
    settings = with_chats(
        tmp_path,
    )
    settings["model"]["tokenizer"]["chat_template"] = "{% for message in messages %}"
    with pytest.raises(InputError, match="chat_template is not a Jinja template"):
        run(settings)


@pytest.mark.parametrize("prompts", [[{"content": "x"}], [[{"role": 3, "content": "x"}]]])
def test_a_message_without_a_role_is_refused(prompts: Any) -> None:
    with pytest.raises(InputError, match="a message needs a role"):
        normalize(
            nodes.parse_yaml(
                json.dumps(with_changes(actions=[{"generate": {"prompts": prompts}}])), "f"
            )
        )
