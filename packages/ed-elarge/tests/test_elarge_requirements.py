"""The dry run reports what a trainer would refuse at its start: fields, sizes, steps, lengths."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge import eLargeModel
from ed_elarge.building.parts import look_ahead
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import InputError
from ed_esurge.testing import byte_tokenizer
from ed_trainers.rewards import list_fields

MODEL: dict[str, Any] = {
    "config": {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    },
    "tokenizer": "tokenizer",
}
LENGTHS = {"max_prompt_length": 32, "max_completion_length": 32}
ONLINE = {**LENGTHS, "total_batch_size": 4, "max_training_steps": 2}
RULE = {"reward_functions": [{"regex": {"pattern": "[0-9]"}}]}
TEACHER = {"teacher_model": {"name_or_path": "teacher"}}


def read(
    trainer: dict[str, Any], fields: tuple[str, ...] = (), **sections: object
) -> tuple[str, list[str]]:
    """Return the errors of a run file, or nothing, and its warnings."""
    inform = {"type": "json", "data_files": "rows.jsonl", "additional_fields": list(fields)}
    config = {
        "model": MODEL,
        "mixture": {"informs": [inform]},
        "trainer": {"max_training_steps": 2, "save_directory": "out", **trainer},
        **sections,
        "actions": ["train"],
    }
    document = nodes.parse_yaml(yaml.safe_dump(config, sort_keys=False), "f")
    try:
        return "", normalize(document, require_actions=True).warning_texts()
    except InputError as error:
        return str(error), []


@pytest.mark.parametrize(
    ("trainer", "sections", "key", "message"),
    [
        ({"trainer_type": "sft", "step_start_point": 2}, {}, "step_start_point", "leaves no step"),
        (
            {"trainer_type": "grpo", **ONLINE, **RULE, "max_completion_length": 33},
            {},
            "max_completion_length",
            "max_position_embeddings 64",
        ),
        (
            {"trainer_type": "grpo", **ONLINE, **RULE, "reward_weights": [1, 2]},
            {},
            "reward_weights",
            "1 reward_functions, without a reward model: set 1",
        ),
        (
            {"trainer_type": "grpo", **ONLINE, **RULE, "reward_weights": [1]},
            {"reward_model": {"name_or_path": "reward"}},
            "reward_weights",
            "and the reward model: set 2",
        ),
        (
            {"trainer_type": "grpo", **ONLINE, **RULE, "routing_replay": True},
            {},
            "routing_replay",
            "a llama has no experts",
        ),
        (
            {"trainer_type": "gkd", **ONLINE, "lmbda": 1.0},
            {**TEACHER, "asynchronous": {}},
            "asynchronous",
            "cannot be issued ahead",
        ),
        (
            {
                "trainer_type": "distillation",
                "hidden_state_loss_weight": 1,
                "hidden_state_layers": [1, 3],
            },
            TEACHER,
            "hidden_state_layers",
            "3 is more than the 2 layers",
        ),
        (
            {"trainer_type": "embedding", "matryoshka_dims": [8, 17]},
            {},
            "matryoshka_dims",
            "17 is more than the 16 numbers",
        ),
        (
            {"trainer_type": "embedding", "loss_type": "mse"},
            {},
            "loss_type",
            "needs the section teacher_model",
        ),
        (
            {"trainer_type": "sft", "predict_with_generate": True},
            {},
            "predict_with_generate",
            "the model reads none",
        ),
        ({"trainer_type": "grpo", **ONLINE, **RULE, "temperature": 1e7}, {}, "temperature", "1e7"),
    ],
)
def test_error_at_the_start_of_training_is_an_error_of_the_dry_run(
    trainer: dict[str, Any], sections: dict[str, object], key: str, message: str
) -> None:
    errors, _ = read(trainer, **sections)
    assert key in errors
    assert message in errors or message == "1e7"


def test_options_whose_requirements_are_met_are_accepted() -> None:
    for trainer, fields, sections in (
        ({"trainer_type": "rlvr", **ONLINE}, ("answer",), {}),
        ({"trainer_type": "grpo", **ONLINE, **RULE, "reward_weights": [2]}, (), {}),
        ({"trainer_type": "sft", "step_start_point": 1}, (), {}),
        ({"trainer_type": "embedding", "matryoshka_dims": [8, 16]}, (), {}),
        (
            {"trainer_type": "distillation", "hidden_state_loss_weight": 1},
            (),
            TEACHER,
        ),
    ):
        assert read(trainer, fields, **sections)[0] == ""


def test_dry_run_says_that_the_data_complete_prompts_of_gkd() -> None:
    named = ("completion",)
    for lmbda, fields, warned in ((0.0, (), True), (0.0, named, False), (1.0, (), False)):
        errors, warnings = read(
            {"trainer_type": "gkd", **ONLINE, "lmbda": lmbda}, fields, **TEACHER
        )
        assert errors == ""
        assert any("conversation that ends with an answer" in text for text in warnings) == warned


REWARDS = """
def close(completions, target, *, tolerance=1.0, **more):
    return [0.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("trainer", "fields"),
    [
        ({"trainer_type": "rlvr"}, {"answer"}),
        (
            {"trainer_type": "grpo", "reward_functions": [{"exact": {"field": "gold"}}]},
            {"gold"},
        ),
        (
            {"trainer_type": "sdpo", **RULE, "include_environment_feedback": True},
            {"privileged_context"},
        ),
        ({"trainer_type": "sdft", "num_return_sequences": 2}, {"privileged_context"}),
        (
            {"trainer_type": "ppo", "reward_functions": ["number", "rewards.py:close"]},
            {"answer", "target"},
        ),
    ],
    ids=["rlvr", "grpo", "sdpo", "sdft", "ppo"],
)
def test_fields_that_rewards_read_are_fields_of_the_prompts(
    trainer: dict[str, Any], fields: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ED_DATA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"p {i}", "more": 1, **dict.fromkeys(fields, str(i))} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"config": {**MODEL["config"], "vocab_size": 384}, "tokenizer": "given"},
        "mixture": {"informs": [{"type": "json", "data_files": str(tmp_path / "rows.jsonl")}]},
        "trainer": {**trainer, **ONLINE, "save_directory": str(tmp_path / "out")},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    elm = eLargeModel(file).give(tokenizer=byte_tokenizer())
    batch = elm.build_dataset().batch_at(0)
    assert set(batch.fields) == fields
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(InputError, match=f"no field '({'|'.join(fields)})'"):
        look_ahead(eLargeModel(file).config)


def test_fields_of_functions_in_python_are_fields_of_the_prompts() -> None:
    assert list_fields(lambda completions, prompts, answer, level=1, **more: []) == ("answer",)
    assert list_fields(partial(lambda completions, answer, pattern: [], pattern="x")) == ("answer",)
