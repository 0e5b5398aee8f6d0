"""Run files with the keys of EasyDeL: their effect, their errors, and the table of the keys."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import yaml
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.table import SECTIONS
from ed_elarge.errors import InputError
from ed_elarge.model import eLargeModel
from ed_infra.easydel_keys import OtherKey, easydel_keys
from ed_infra.easydel_rules import KEY_RULES
from ed_trainers.options.groups import RLVRArguments
from run_files import with_changes

ENTRIES = [entry for group in easydel_keys().values() for entry in group]


def read(**changes: Any) -> RunConfig:
    """Read a run file with some keys changed, as `with_changes` names them."""
    text = yaml.safe_dump(with_changes(**changes), sort_keys=False)
    return normalize(nodes.parse_yaml(text, "f"))


def refuse(**changes: Any) -> str:
    """Return the message of the error of a run file."""
    with pytest.raises(InputError) as error:
        read(**changes)
    return str(error.value)


def value_of(run: RunConfig, path: str) -> object:
    """Return a value of the canonical form of a run."""
    value: Any = run.to_dict()
    for part in path.split("."):
        value = value[part]
    return value


WORKING = [
    ("trainer", "use_wandb", True, "trainer.report_to", ["wandb"]),
    ("trainer", "wandb_name", "x", "trainer.run_name", "x"),
    ("trainer", "wandb_entity", "x", "trainer.tracker_entity", "x"),
    ("trainer", "esurge_page_size", 64, "training_engine.page_size", 64),
    ("trainer", "esurge_hbm_utilization", 0.5, "training_engine.hbm_utilization", 0.5),
    ("trainer", "shuffle_train_dataset", False, "mixture.shuffle_buffer_size", 1),
    ("trainer", "shuffle_train_dataset", False, "mixture.pack_shuffle", False),
    ("trainer", "shuffle_seed_train", 7, "mixture.seed", 7),
    ("trainer", "dataset_num_proc", 2, "mixture.tokenization.num_proc", 2),
    ("trainer", "dataloader_num_workers", 3, "mixture.prefetch_workers", 3),
    ("trainer", "dataloader_num_workers", 0, "mixture.prefetch_workers", 2),
    ("trainer", "packing_strategy", "wrapped", "mixture.pack_strategy", "wrapped"),
    ("trainer", "model_name", "small", "trainer.save_directory", "EasyDeL-Checkpoints/small"),
    ("trainer", "generation_do_sample", True, "trainer.generation_do_sample", True),
    ("trainer", "generation_top_k", 5, "trainer.generation_top_k", 5),
    ("trainer", "log_grad_norms", True, "trainer.log_grad_norms", True),
    ("trainer", "loss_config", {"z_loss": 1e-4}, "trainer.z_loss_coefficient", 1e-4),
    ("trainer", "backend", "cpu", "platform.backend", "cpu"),
    ("trainer", "dataset_text_field", "story", "mixture.informs", "story"),
    ("mixture", "num_workers", 3, "mixture.prefetch_workers", 3),
    ("mixture", "prefetch_size", 9, "mixture.prefetch_buffer_size", 9),
    ("loader", "precision", "fastest", "loader.precision", "default"),
    ("loader", "precision", "HIGHEST", "loader.precision", "highest"),
    ("loader", "device", "cpu:0", "platform.backend", "cpu"),
    ("esurge", "verbose", True, "esurge.silent_mode", False),
    ("eval", "hard_max_new_tokens", True, "eval.gen_kwargs", {"max_gen_toks": 256}),
]


@pytest.mark.parametrize(("section", "key", "value", "path", "here"), WORKING)
def test_key_of_easydel_has_its_effect(
    section: str, key: str, value: object, path: str, here: object
) -> None:
    result = value_of(read(**{f"{section}__{key}": value}), path)
    if path == "mixture.informs":
        assert isinstance(result, list)
        result = result[0]["content_field"]
    assert result == here


def test_bits_and_group_belong_to_the_quantization_mode() -> None:
    keys = {"mode": "affine", "bits": 8, "group_size": 32}
    run = read(**{f"trainer__quantization_{name}": value for name, value in keys.items()})
    model = run.weight_format
    assert model is not None and model.simulate and not run.has_frozen_weights
    assert (model.quantization_method, model.group_size) == ("int8", 32)
    wrong = refuse(trainer__quantization_mode="nf4", trainer__quantization_bits=3)
    assert "nf4 has 4 bits, not 3" in wrong
    assert "without quantization_mode" in refuse(trainer__quantization_group_size=32)
    both = refuse(
        trainer__quantization_mode="nf4", quantization__model={"quantization_method": "nf4"}
    )
    assert "quantization.model sets a format, too" in both


def test_benchmarks_as_mappings_are_tasks_and_options() -> None:
    entry = {"name": "math", "tasks": ["gsm8k"], "num_fewshot": 0, "verbosity": "INFO"}
    run = read(trainer__benchmarks=[entry], trainer__benchmark_interval=5)
    assert value_of(run, "trainer.benchmarks") == ["gsm8k"]
    assert value_of(run, "trainer.benchmark_options") == {"num_fewshot": 0}
    assert "trainer.benchmarks.verbosity" in run.note
    other = {"tasks": "arc_easy", "num_fewshot": 5}
    assert "different options" in refuse(trainer__benchmarks=[entry, other])
    message = refuse(trainer__benchmarks=[{"tasks": "gsm8k", "num_fewshots": 1}])
    assert "did you mean 'num_fewshot'" in message


def test_second_model_of_easydel_is_the_teacher() -> None:
    teacher = {"name_or_path": "t", "tokenizer": "t", "task": "auto-bind"}
    run = read(teacher=teacher, trainer__trainer_type="distillation")
    assert value_of(run, "teacher_model.name_or_path") == "t"
    both = refuse(teacher=teacher, teacher_model={"name_or_path": "u"})
    assert "teacher and teacher_model are two names of one section" in both
    other = {"name_or_path": "r", "tokenizer": "other", "extra_kwargs": {"num_labels": 2}}
    message = refuse(reward_model={**other, "task": "causal-lm"}, trainer__trainer_type="grpo")
    for words in ("omit the key", "2 is not supported", "the task of this model is"):
        assert words in message


@pytest.mark.parametrize(
    ("actions", "served"),
    [(["serve"], True), ([{"serve": {"port": 1024}}], True), (["validate"], False)],
)
def test_parsers_of_the_engine_are_those_of_the_server(actions: list[Any], served: bool) -> None:
    keys = {"tool_parser": "glm-4.5", "reasoning_parser": "qwen3_reasoning"}
    run = read(**{f"esurge__{k}": v for k, v in keys.items()}, actions=actions)
    if served:
        options: Any = run.actions[0].options
        assert (options.tool_parser_name, options.reasoning_parser) == ("glm45", "qwen3")
    assert "unknown tool parser 'hermess'" in refuse(esurge__tool_parser="hermess", actions=actions)


def test_keys_without_effect_are_one_line() -> None:
    run = read(
        trainer__use_grain=False,
        trainer__offload_device_type="cpu",
        trainer__performance_mode=True,
        mixture__use_sharded_source=False,
    )
    (line,) = (text for text in run.warning_texts() if "EasyDeL" in text)
    assert "\n" not in line
    for name in ("use_grain", "offload_device_type", "performance_mode"):
        assert f"trainer.{name}" in line
    assert "mixture.use_sharded_source" in line
    assert "trainer: use_grain" not in run.to_yaml()


ERRORS = [
    ({"trainer__sparsify_module": True}, "trainer.sparsify_module: True is not supported"),
    ({"trainer__repetition_penalty": 1.2}, "1.2 is not supported; omit it"),
    ({"trainer__use_wandb": True, "trainer__report_to": "mlflow"}, "keep report_to"),
    ({"trainer__wandb_name": "a", "trainer__run_name": "b"}, "wandb_name and trainer.run_name"),
    ({"trainer__wandb_name": "a", "trainer__run_name": "a"}, "wandb_name and trainer.run_name"),
    ({"trainer__shuffle_seed_train": 1, "mixture__seed": 2}, "shuffle_seed_train and mixture.seed"),
    ({"trainer__packing": False}, "trainer.packing and mixture.pack_tokens are one option"),
    ({"trainer__esurge_page_size": "big"}, "training_engine.page_size: must be a valid integer"),
    ({"trainer__esurge_hbm_utilization": 1.5}, "hbm_utilization: must be less than or equal to 1"),
    ({"trainer__esurge_pages_size": 64}, "unknown key 'esurge_pages_size'"),
    ({"esurge__esurge_page_size": 64}, "unknown key 'esurge_page_size'"),
    ({"mixture__use_grain": True}, "unknown key 'use_grain'"),
    ({"trainer__shuffle_train_dataset": "no"}, "must be true or false, got 'no'"),
    ({"trainer__shuffle_train_dataset": 1}, "must be true or false, got 1"),
    ({"trainer__model_name": "../x"}, "must be the name of a folder"),
    ({"trainer__loss_config": {"reduction": "sum"}}, "'sum' is not supported"),
    ({"trainer__loss_config": {"label_smooth": 0.1}}, "did you mean 'label_smoothing'"),
    ({"trainer__generation_do_sample": True, "trainer__generation_temperature": 0}, "samples"),
    ({"trainer__max_feedback_length": 96}, "unknown key 'max_feedback_length'"),
    ({"loader__precision": "fast"}, "unknown precision 'fast' (known: default, high"),
    ({"quantization__model": {"quantization_method": "nf4", "bits": 8}}, "nf4 has 4 bits, got 8"),
]


@pytest.mark.parametrize(("changes", "words"), ERRORS, ids=lambda value: str(value)[:50])
def test_wrong_key_of_easydel_is_an_error_with_its_line(
    changes: dict[str, Any], words: str
) -> None:
    message = refuse(**changes)
    line = next((line for line in message.splitlines() if words in line), message)
    assert words in line
    assert line.startswith("f:")


def test_error_of_a_moved_value_shows_the_typed_key() -> None:
    message = refuse(trainer__esurge_page_size="big")
    assert "esurge_page_size: big" in message


def test_null_of_easydel_is_the_default() -> None:
    names = ("wandb_entity", "wandb_name", "esurge_page_size", "repetition_penalty", "watchers")
    names += ("shuffle_seed_train", "loss_config", "quantization_mode", "use_wandb")
    run = read(**{f"trainer__{name}": None for name in names})
    assert run.to_dict() == read().to_dict()
    assert not run.note


def test_json_and_python_have_the_same_keys_as_yaml() -> None:
    config = with_changes(
        trainer__use_wandb=True, trainer__esurge_page_size=64, loader__precision="fastest"
    )
    from_yaml = normalize(nodes.parse_yaml(yaml.safe_dump(config), "f")).to_dict()
    assert normalize(nodes.parse_yaml(json.dumps(config), "f")).to_dict() == from_yaml
    config.pop("actions")
    from_yaml.pop("actions")
    assert eLargeModel(config).to_dict() == from_yaml
    elm = eLargeModel(with_changes(actions=...)).set_trainer(use_wandb=True, esurge_page_size=64)
    assert elm.set_loader(precision="fastest").to_dict() == from_yaml


def test_arguments_in_python_have_the_keys_of_easydel() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = RLVRArguments(
            use_wandb=True, use_grain=False, max_len_mask=True, format_pattern="x",
            format_reward_weight=0.1, do_eval=True,
        )  # fmt: skip
    assert options.report_to == ("wandb",)
    assert isinstance(options, RLVRArguments)
    assert options.mask_truncated_completions
    assert options.reward_weights == (1.0, 0.1)
    (warning,) = caught
    assert "trainer.use_grain" in str(warning.message)


@pytest.mark.parametrize("name", ["scheduler", "lr_scheduler_type", "lr_scheduler"])
def test_end_of_a_learning_rate_without_a_schedule_is_named_and_omitted(name: str) -> None:
    keys: dict[str, Any] = {"learning_rate": 1e-3, "learning_rate_end": 1e-4, "use_wandb": False}
    with pytest.warns(UserWarning, match="learning_rate_end .without a scheduler"):
        assert RLVRArguments(**keys).learning_rate_end is None
    assert RLVRArguments(**keys, **{name: "cosine"}).learning_rate_end == 1e-4
    run = read(trainer__learning_rate_end=1e-7, trainer__use_grain=True, trainer__scheduler=...)
    assert "trainer.learning_rate_end (without a scheduler" in run.note
    # A file without keys of EasyDeL has an error.
    with pytest.raises(ValueError, match="has no effect with scheduler 'none'"):
        RLVRArguments(learning_rate=1e-3, learning_rate_end=1e-4)


def test_batch_of_a_file_of_easydel_counts_prompts() -> None:
    keys = {"trainer_type": "grpo", "reward_functions": ["format"], "total_batch_size": 2}
    base = {f"trainer__{name}": value for name, value in keys.items()}
    base |= {"mixture__pack_tokens": ..., "mixture__pack_seq_length": ...}
    run = read(**base, trainer__shuffle_train_dataset=True)
    assert value_of(run, "trainer.batch_unit") == "prompts"
    assert "total_batch_size counts prompts" in run.note
    assert "is not a multiple of num_return_sequences" in refuse(**base)
    # Keys that TRL has, too, say nothing about the program of a file.
    assert "is not a multiple" in refuse(**base, trainer__dataset_num_proc=2)
    unit = {"trainer__use_grain": True, "trainer__batch_unit": "completions"}
    assert "is not a multiple" in refuse(**base, **unit)


def test_previews_of_a_model_without_text_are_named_and_omitted() -> None:
    keys = {"trainer_type": "reward", "generation_interval": 5, "generation_do_sample": True}
    keys["esurge_use_tqdm"] = True
    changes = {f"trainer__{name}": value for name, value in keys.items()}
    changes |= {"mixture__pack_tokens": ..., "mixture__pack_seq_length": ...}
    run = read(**changes)
    assert run.trainer is not None and run.trainer.generation_interval is None
    assert "trainer.generation_interval, trainer.generation_do_sample: the model" in run.note
    del changes["trainer__esurge_use_tqdm"]
    assert "generates no text: omit the key" in refuse(**changes)


def test_column_of_the_answer_is_read_for_the_reward() -> None:
    changes = {"mixture__pack_tokens": ..., "mixture__pack_seq_length": ...}
    run = read(trainer__trainer_type="rlvr", trainer__answer_key="gold", **changes)
    assert value_of(run, "trainer.reward_functions") == [{"math_answer": {"field": "gold"}}]
    assert run.mixture is not None
    assert [one.additional_fields for one in run.mixture.informs] == [("gold",)]


def test_server_of_easydel_has_one_worker() -> None:
    serve = {"serve": {"workers": 1, "reload": False, "port": 1024}}
    assert len(read(actions=[serve]).actions) == 1
    serve["serve"]["workers"] = 2
    assert "unknown key 'workers'" in refuse(actions=[serve])


def test_method_without_a_place_is_an_error_with_one() -> None:
    message = refuse(trainer__trainer_type="agentic-moshpit")
    assert "'agentic-moshpit' is not supported; use grpo, with the class of an" in message


# The table.


def classes_of(entry: OtherKey) -> list[type]:
    """Return the option classes of the section, for the methods of the entry."""
    classes = SECTIONS[entry.section].classes()
    return [classes[name] for name in entry.methods] if entry.methods else [*classes.values()]


def test_no_entry_is_a_key_here() -> None:
    for entry in ENTRIES:
        for cls in classes_of(entry):
            known = {*cls.model_fields, *cls.ALIASES}
            assert "." in entry.name or entry.name not in known, (entry.name, cls)


def test_every_place_is_a_key_here() -> None:
    for entry in (one for one in ENTRIES if one.kind == "works"):
        if not entry.target:
            assert (entry.section, entry.name) in KEY_RULES or entry.name.startswith("benchmarks.")
            continue
        section, key, *_ = entry.target
        if section == "serve":
            continue
        known = [cls.model_fields for cls in SECTIONS[section].classes().values()]
        assert any(key in fields for fields in known), entry


def test_entries_have_distinct_names_and_texts() -> None:
    names = [(one.section, one.name, one.methods) for one in ENTRIES]
    assert len(names) == len({*names})
    assert all(one.text for one in ENTRIES)
