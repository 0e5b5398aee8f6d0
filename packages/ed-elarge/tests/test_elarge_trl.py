"""Scripts of TRL: the arguments of its configurations and trainers, and their runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from ed_elarge import trl as scripts
from ed_elarge.building.trl_scripts import (
    build_placeholders,
    build_run,
    convert_adapters,
    convert_arguments,
    convert_model_options,
)
from ed_elarge.building.trl_trainer import format_rows
from ed_elarge.command.foreign_files import convert_foreign_file
from ed_elarge.config.other_files import build_run_sections
from ed_elarge.migration.conversion import Conversion
from ed_elarge.migration.trl_arguments import PEFT_DEFAULTS, TRL_METHODS
from ed_infra.errors import ConfigError

CONFIGS: dict[str, Any] = {name: getattr(scripts, f"{name}Config") for name in TRL_METHODS}
TRAINERS: dict[str, Any] = {name: getattr(scripts, f"{name}Trainer") for name in TRL_METHODS}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def get_trainer_options(name: str, **arguments: Any) -> Any:
    method = TRL_METHODS[name]
    conversion = convert_arguments(method, arguments, 1)
    return build_run(conversion, name, build_placeholders(method)).trainer


@pytest.mark.parametrize("name", TRL_METHODS)
def test_every_default_of_trl_is_accepted_as_an_explicit_value(name: str) -> None:
    defaults = TRL_METHODS[name].defaults
    config = CONFIGS[name](**defaults)
    assert config.to_dict() == defaults
    assert CONFIGS[name]().learning_rate == defaults["learning_rate"]


def test_arguments_of_a_script_and_of_a_file_are_the_same_options(tmp_path: Path) -> None:
    arguments = {
        "output_dir": "out",
        "max_length": 64,
        "packing": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.25,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "optim": "adamw_8bit",
        "bf16": False,
    }
    path = tmp_path / "sft.json"
    path.write_text(json.dumps({**arguments, "test_split_size": 0.1}))
    expected: Any = build_run_sections(convert_foreign_file(path, tool="trl", method="sft"))
    actual: Any = build_run_sections(convert_arguments(TRL_METHODS["SFT"], arguments, 1))
    assert actual["mixture"]["pack_tokens"] is True
    for section in ("loader", "trainer"):
        assert actual[section].items() >= expected[section].items()


def test_options_that_differ_from_this_project_have_the_defaults_of_trl() -> None:
    reward = get_trainer_options("Reward")
    assert reward.center_rewards_coefficient is None and reward.learning_rate == 1e-4
    grpo = get_trainer_options("GRPO", max_completion_length=8)
    assert (grpo.num_return_sequences, grpo.beta, grpo.total_batch_size) == (8, 0.0, 8)
    assert grpo.loss_type == "dapo"
    dpo = get_trainer_options("DPO", loss_type=["ipo"], beta=0.3)
    assert (dpo.loss_type, dpo.beta, dpo.weight_decay) == ("ipo", 0.3, 0.0)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("SFT", {"per_device_train_batch_siz": 2}, "did you mean 'per_device_train_batch_size'"),
        ("SFT", {"num_generations": 2}, "it is an argument of GRPOConfig"),
        ("SFT", {"learning_rate": "fast"}, "learning_rate: must be a valid number"),
        ("SFT", {"eval_strategy": "often"}, "eval_strategy: 'often' is none of"),
        ("SFT", {"max_steps": 2.5}, "2.5 is no whole number"),
        ("SFT", {"lr_scheduler_type": "spiral"}, "lr_scheduler_type='spiral'"),
        ("SFT", {"dataset_kwargs": {"skip_prepare_dataset": True}}, "changes the result"),
        ("DPO", {"f_divergence_type": "cosine"}, "f_divergence_type: "),
        ("SFT", {"loss_type": ["nll", "dft"]}, "a run of this method has one loss"),
        ("GRPO", {"repetition_penalty": 1.2}, "samples of the model's distribution"),
        ("GRPO", {"per_device_train_batch_size": 3}, "num_generations|num_return_sequences"),
    ],
)
def test_argument_without_a_counterpart_is_an_error(
    name: str, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        CONFIGS[name]("out", **arguments)


def test_attributes_of_a_configuration_are_its_arguments() -> None:
    config = CONFIGS["SFT"]("out", evaluation_strategy="epoch")
    config.max_seq_length = 32
    assert (config.eval_strategy, config.max_length, config.seed) == ("epoch", 32, 42)
    assert config.to_dict()["max_length"] == 32
    with pytest.raises(ConfigError, match="did you mean 'packing'"):
        config.packin = True
    with pytest.raises(AttributeError, match="max_lenght"):
        _ = config.max_lenght
    with pytest.raises(AttributeError, match="did you mean 'SFTTrainer'"):
        _ = scripts.SFTTrainr


@pytest.mark.parametrize("kind", ["mapping", "object"])
def test_adapters_have_the_values_of_peft(kind: str) -> None:
    arguments = {"r": 4, "lora_alpha": 16, "target_modules": {"v_proj", "q_proj"}}
    config = arguments if kind == "mapping" else scripts.LoraConfig(**arguments)
    conversion = Conversion({}, "TRL")
    convert_adapters(conversion, config)
    assert build_run_sections(conversion)["lora"] == {
        "rank": 4,
        "alpha": 16,
        "dropout": 0.0,
        "targets": ["q_proj", "v_proj"],
        "dora": False,
        "rslora": False,
    }


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rank": 4}, "LoraConfig has no argument 'rank'"),
        ({"layers_to_transform": [1]}, "layers_to_transform=.*changes the result"),
        ({"init_lora_weights": "eva"}, "needs rows of data before training"),
        ({"init_lora_weights": "gaussian"}, "'gaussian' is unknown"),
        ({"peft_type": "PROMPT_TUNING"}, "adapters here are LoRA"),
        (4, "peft_config is a int"),
    ],
)
def test_adapters_without_a_counterpart_are_an_error(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert_adapters(Conversion({}, "TRL"), config)


def test_keywords_of_from_pretrained_are_converted() -> None:
    bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    converted = convert_model_options(
        {"torch_dtype": "bfloat16", "device_map": "auto", "quantization_config": bits}
    )
    assert converted == {
        "param_dtype": "bfloat16",
        "quantization_config": {"dtype": "nf4", "double_quantization": True},
        "apply_quantization": True,
    }
    with pytest.raises(ConfigError, match="no argument 'attn_implementatio'"):
        convert_model_options({"attn_implementatio": "sdpa"})


@pytest.mark.parametrize(
    ("values", "arguments", "words"),
    [
        (("model",), {}, "pass train_dataset"),
        (("model",), {"train_datasets": []}, "did you mean 'train_dataset'"),
        (("model",), {"train_dataset": [], "rollout_func": print}, "rollout_func has no"),
        (("model",), {"train_dataset": {"train": []}}, "pass one of them"),
        (("model", None, 3), {"train_dataset": []}, "args of GRPOTrainer is a int"),
        ((object(),), {"train_dataset": [{}]}, "pass a folder"),
    ],
)
def test_argument_of_a_trainer_without_a_counterpart_is_an_error(
    values: tuple[object, ...], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        TRAINERS["GRPO"](*values, **arguments)


def test_formatting_function_returns_the_text_of_each_row() -> None:
    from datasets import Dataset

    rows = [{"q": f"{i}?", "a": f"{i}!"} for i in range(3)]
    texts = [{"text": f"{i}? {i}!"} for i in range(3)]
    for given in (rows, Dataset.from_list(rows), Dataset.from_list(rows).to_iterable_dataset()):
        assert list(format_rows(given, lambda row: f"{row['q']} {row['a']}")) == texts
    with pytest.raises(ConfigError, match="returned a list"):
        format_rows(rows, lambda row: [row["q"]])


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def list_rows(kind: str) -> list[dict[str, Any]]:
    """Return rows in the forms of TRL's documentation."""
    numbers = range(8)
    user = [[say("user", f"{i}?")] for i in numbers]
    good = [[say("assistant", f"{i}!")] for i in numbers]
    bad = [[say("assistant", "no")]] * len(numbers)
    rows: dict[str, list[dict[str, Any]]] = {
        "messages": [{"messages": u + g} for u, g in zip(user, good, strict=True)],
        "completions": [{"prompt": u, "completion": g} for u, g in zip(user, good, strict=True)],
        "texts": [{"prompt": f"{i}? ", "completion": f"{i}!"} for i in numbers],
        "pairs": [
            {"chosen": u + g, "rejected": u + b} for u, g, b in zip(user, good, bad, strict=True)
        ],
        "labels": [
            {"prompt": f"{i}? ", "completion": f"{i}!", "label": i % 2 == 0} for i in numbers
        ],
        "prompts": [{"prompt": u, "solution": str(i)} for i, u in enumerate(user)],
    }
    return rows[kind]


def reward_solution(completions: Any, solution: Any, **fields: Any) -> list[float]:
    pairs = zip(completions, solution, strict=True)
    return [float(answer in completion[0]["content"]) for completion, answer in pairs]


async def reward_later(completions: Any, **fields: Any) -> list[float]:
    return [1.0 for _ in completions]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "rows", "arguments", "more"),
    [
        ("SFT", "messages", {"assistant_only_loss": True, "packing": True}, {}),
        ("SFT", "completions", {"completion_only_loss": True}, {"peft_config": {"r": 4}}),
        ("SFT", "texts", {"model_init_kwargs": {"dtype": "bfloat16"}}, {}),
        ("DPO", "pairs", {"beta": 0.2}, {"peft_config": {"r": 4}}),
        ("KTO", "labels", {}, {}),
        ("ORPO", "pairs", {}, {}),
        ("CPO", "pairs", {}, {}),
        ("Reward", "pairs", {}, {}),
        (
            "GRPO",
            "prompts",
            {"num_generations": 2, "max_completion_length": 8, "beta": 0.04},
            {"reward_funcs": [reward_solution, reward_later, "number"]},
        ),
        (
            "RLOO",
            "prompts",
            {"num_generations": 2, "max_completion_length": 8},
            {"reward_funcs": reward_solution},
        ),
    ],
)
def test_script_of_each_kind_trains(
    name: str,
    rows: str,
    arguments: dict[str, Any],
    more: dict[str, Any],
    quickstart_model: Path,
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(quickstart_model)
    tokenizer.chat_template = TEMPLATE
    given: list[dict[str, Any]] = list_rows(rows)
    if name == "GRPO":
        given = [{**row, "answer": row["solution"]} for row in given]
    common = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "bf16": False}
    if name not in ("GRPO", "RLOO"):
        common["max_length"] = 48
    config = CONFIGS[name](tmp_path / "run", **common, **arguments)
    trainer = TRAINERS[name](
        str(quickstart_model),
        args=config,
        train_dataset=given,
        processing_class=tokenizer,
        **more,
    )
    result = trainer.train()
    assert result.global_step == 2 == trainer.state.global_step
    assert [row["step"] for row in trainer.state.log_history] == [1, 2]
    trainer.save_model(tmp_path / "saved")
    adapter = (tmp_path / "saved/adapter_config.json").is_file()
    assert adapter == ("peft_config" in more)
    assert (tmp_path / "saved/tokenizer_config.json").is_file()


@pytest.mark.nightly
def test_script_with_tools_trains(quickstart_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    def look(place: str) -> str:
        """
        Look.

        Args:
            place: The place.
        """
        return place

    tokenizer: Any = AutoTokenizer.from_pretrained(quickstart_model)
    tokenizer.chat_template = TEMPLATE
    trainer = TRAINERS["GRPO"](
        str(quickstart_model),
        reward_funcs=lambda completions, **fields: [float(len(one)) for one in completions],
        args=CONFIGS["GRPO"](
            tmp_path / "run",
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            max_tool_calling_iterations=2,
            bf16=False,
        ),
        train_dataset=[{"prompt": [{"role": "user", "content": "Look."}]}] * 4,
        processing_class=tokenizer,
        tools=[look],
    )
    assert trainer.trainer.arguments.max_turns == 3
    assert trainer.trainer.method.tools.functions == {"look": look}
    assert trainer.train().global_step == 1


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("name", TRL_METHODS)
def test_arguments_and_defaults_equal_those_of_the_installed_trl(name: str) -> None:
    trl = pytest.importorskip("trl")
    module: Any = trl
    if not hasattr(trl, f"{name}Config"):
        module = pytest.importorskip(f"trl.experimental.{name.lower()}")
    config = getattr(module, f"{name}Config")
    expected = {}
    for field in dataclasses.fields(config):
        value = field.default
        if value is dataclasses.MISSING:
            value = (
                None if field.default_factory is dataclasses.MISSING else field.default_factory()
            )
        expected[field.name] = getattr(value, "value", value)
    assert TRL_METHODS[name].defaults == expected
    signature = inspect.signature(getattr(module, f"{name}Trainer").__init__)
    assert TRL_METHODS[name].trainer_arguments == tuple(signature.parameters)[1:]


@pytest.mark.nightly
@pytest.mark.torch
def test_arguments_of_adapters_equal_those_of_the_installed_peft() -> None:
    peft = pytest.importorskip("peft")
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert {*PEFT_DEFAULTS} == names
    conversion = Conversion({}, "TRL")
    convert_adapters(conversion, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert conversion.values["lora.rank"] == 4
