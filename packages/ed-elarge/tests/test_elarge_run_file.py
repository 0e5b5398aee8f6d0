"""Run files: accepted forms, derived values, and the messages of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge.config import nodes
from ed_elarge.config.description import describe_run_file
from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.table import check_machine
from ed_elarge.errors import InputError
from ed_trainers.options.optimizers import OPTIMIZERS
from run_files import GOOD, with_changes

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(config: dict[str, Any]) -> RunConfig:
    return normalize(
        nodes.parse_yaml(yaml.safe_dump(config, sort_keys=False), "f"), require_actions=True
    )


def refuse(config: dict[str, Any] | str) -> str:
    text = config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False)
    with pytest.raises(InputError) as error:
        check_machine(normalize(nodes.parse_yaml(text, "f"), require_actions=True))
    return str(error.value)


# What is accepted.


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.name)
def test_examples_read_and_read_back(path: Path) -> None:
    first = normalize(nodes.read_yaml(path), require_actions=True)
    again = normalize(nodes.parse_yaml(first.to_yaml()), require_actions=True)
    assert again.to_dict() == first.to_dict()
    as_json = normalize(nodes.parse_yaml(first.to_json()), require_actions=True)
    assert as_json.to_dict() == first.to_dict()


@pytest.mark.parametrize("wrapper", ["config", "elarge_model", "elm"])
def test_wrapper_section_does_not_change_run_file(wrapper: str) -> None:
    sections = {key: value for key, value in GOOD.items() if key != "actions"}
    outside = run({wrapper: sections, "actions": GOOD["actions"]})
    inside = run({wrapper: GOOD})
    assert outside.to_dict() == inside.to_dict() == run(GOOD).to_dict()


#: From EasyDeL's guide, unchanged.
GUIDE = {
    "SFT": """
model:
  name_or_path: meta-llama/Llama-2-7b-hf

loader:
  dtype: bf16
  param_dtype: bf16

sharding:
  axis_dims: [1, -1, 1, 1, 1]

mixture:
  informs:
    - type: json
      data_files: "train/*.json"
      content_field: text
  batch_size: 32
  pack_tokens: true
  pack_seq_length: 2048

trainer:
  trainer_type: sft
  learning_rate: 2.0e-5
  num_train_epochs: 3
  total_batch_size: 32
  gradient_accumulation_steps: 4
  warmup_steps: 100
  save_directory: ./llama-sft-output
  save_steps: 500
  log_steps: 10

actions:
  - validate
  - train
""",
    "evaluation": """
model:
  name_or_path: meta-llama/Llama-2-7b-hf

loader:
  dtype: bf16

sharding:
  axis_dims: [1, 1, 1, -1, 1]

esurge:
  max_model_len: 4096
  max_num_seqs: 64
  hbm_utilization: 0.9
  enable_prefix_caching: true

eval:
  max_new_tokens: 512
  temperature: 0.0
  batch_size: 32

actions:
  - validate
  - eval:
      tasks: [hellaswag, winogrande, arc_easy, arc_challenge]
      engine: esurge
      num_fewshot: 0
      output_path: ./eval_results.json
      print_results: true
""",
}


@pytest.mark.parametrize("name", GUIDE)
def test_guide_run_files_normalize_idempotently(name: str) -> None:
    first = normalize(nodes.parse_yaml(GUIDE[name]), require_actions=True)
    assert normalize(nodes.parse_yaml(first.to_yaml())).to_dict() == first.to_dict()


def test_aliases_normalize_to_canonical_keys() -> None:
    config = with_changes(
        model__task="causal_lm",
        loader={"dtype": "bf16"},
        sharding={"sharding_axis_dims": [1, 1, 1, 1, 1]},
        base_config={"values": {"attention_mechanism": "flash"}},
        esurge={"gpu_memory_utilization": 0.5},
    )
    found = run(config).to_dict()
    assert found["model"]["task"] == "causal-language-model"
    assert found["loader"]["dtype"] == "bfloat16"
    assert found["sharding"]["axis_dims"] == [1, 1, 1, 1, 1]
    assert found["esurge"]["hbm_utilization"] == 0.5


def test_explicit_null_is_kept_by_normalization() -> None:
    found = run(with_changes(trainer__master_dtype=None)).to_dict()
    assert found["trainer"]["master_dtype"] is None


@pytest.mark.parametrize(
    ("actions", "names"),
    [
        ("train", ["train"]),
        (["Train", {"Save-YAML": "x.yaml"}], ["train", "to_yaml"]),
        ({"validate": None, "generate": {"prompt": "a"}}, ["validate", "generate"]),
        ([{"serve": None, "host": "localhost", "port": 8000}], ["serve"]),
        (["show", "config", "server"], ["print", "dump_config", "serve"]),
        ([{"write_json": {"path": "x"}}], ["to_json"]),
    ],
)
def test_actions_in_all_their_forms(actions: Any, names: list[str]) -> None:
    found = run(with_changes(actions=actions)).actions
    assert [action.name for action in found] == names
    if names == ["serve"]:
        assert (found[0].options.host, found[0].options.port) == ("localhost", 8000)


# What follows from what.


def test_batch_sizes_are_one_number() -> None:
    assert run(GOOD).mixture.batch_size == 8
    found = run(with_changes(mixture__batch_size=4, trainer__total_batch_size=...))
    assert found.trainer.total_batch_size == 4
    message = refuse(with_changes(mixture__batch_size=4))
    assert "trainer.total_batch_size: 8 differs from mixture.batch_size (4)" in message
    message = refuse(
        with_changes(
            mixture__batch_size=4,
            trainer__total_batch_size=...,
            trainer__gradient_accumulation_steps=3,
        )
    )
    assert "total_batch_size 4 does not divide into 3" in message
    # the default of the trainer, 32, must not stand in the way
    assert run(
        with_changes(
            mixture__batch_size=6,
            trainer__total_batch_size=...,
            trainer__gradient_accumulation_steps=3,
        )
    )


def test_conflicting_sequence_lengths_raise_input_error() -> None:
    unpacked = {"mixture__pack_tokens": False, "mixture__pack_seq_length": ...}
    assert run(with_changes(**unpacked)).sequence_length == (2048, "")  # positions of the model
    assert run(with_changes(**unpacked, trainer__max_length=32))
    message = refuse(with_changes(trainer__max_length=32))
    assert "trainer.max_length: 32 differs from mixture.pack_seq_length (64)" in message
    message = refuse(
        with_changes(**unpacked, trainer__max_length=32, mixture__tokenization={"max_length": 33})
    )
    assert "33 is more than trainer.max_length (32)" in message
    message = refuse(with_changes(mixture__pack_seq_length=4096))
    assert "4096 is more than the model's max_position_embeddings (2048)" in message
    wide = with_changes(
        mixture__pack_seq_length=4096,
        base_config={"values": {"max_position_embeddings": 4096}},
    )
    assert run(wide)


def test_seed_of_data_falls_back_to_the_trainers() -> None:
    assert run(with_changes(trainer__seed=7)).mixture.seed == 7
    assert run(with_changes(trainer__seed=7, mixture__seed=3)).mixture.seed == 3


# What each mistake is told: (changes, where, words).

MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "mixture__mixture_weights": {"topics": 1},
            "mixture__mixture_schedule": {"points": [{"step": 5, "weights": {"topic": 1}}]},
        },
        "mixture.mixture_schedule.points[0].weights.topic",
        "did you mean 'topics'?",
    ),
    (
        {"mixture__informs": [{"type": "visual", "data_files": "a.json", "image_field": "p"}]},
        "mixture.informs[0].type",
        "has images, and the model is for 'causal-language-model'",
    ),
    (
        {"mixture__save": {"path": "x", "push_to_hub": True}},
        "mixture.save",
        "push_to_hub requires the id",
    ),
    ({"trainer__learning_ratee": 1}, "trainer.learning_ratee", "did you mean 'learning_rate'?"),
    ({"trainer__bf16": True}, "trainer.bf16", "unknown key 'bf16'; use the section loader"),
    ({"trainer__tf_32": True}, "trainer.tf_32", "unknown key 'tf_32'"),
    ({"trainer__learning_rate": "abc"}, "trainer.learning_rate", "got 'abc'"),
    ({"trainer__optimizer": "adamww"}, "trainer.optimizer", "did you mean 'adamw'?"),
    ({"trainer__trainer_type": "sftt"}, "trainer.trainer_type", "did you mean 'sft'?"),
    ({"trainer__save_steps": -1}, "trainer.save_steps", "must be greater than 0, got -1"),
    ({"trainr": {}}, "trainr", "unknown section 'trainr'; did you mean 'trainer'?"),
    ({"reward_model": {}}, "reward_model", "the key 'name_or_path' is missing"),
    (
        {"quantization": {"model": {"quantization_method": "nf5"}}},
        "quantization.model.quantization_method",
        "did you mean 'nf4'?",
    ),
    ({"quantization": {"kv_cache": {"method": "nf9"}}}, "quantization.kv_cache", "'nf9'"),
    (
        {"quantization": {"model": {}}, "trainer__trainable_rules": [["", True]]},
        "trainer.trainable_rules",
        "with quantization.model only the adapters",
    ),
    ({"quantization": {"model": {}}}, "quantization.model", "has randomly initialized weights"),
    (
        {"quantization": {"model": {"dtype": "gguf"}}, "model": {"name_or_path": "org/name"}},
        "quantization.model.dtype",
        "gguf keeps the codes of a GGUF file, and model.name_or_path is none",
    ),
    ({"lora": {"name_or_path": "a/b", "rank": 4}}, "lora", "rank: the adapter of name_or_path"),
    ({"lora": {"name_or_path": "./nowhere"}}, "lora.name_or_path", "no such directory"),
    ({"lora": {"name_or_path": "package:nowhere/a"}}, "lora.name_or_path", "uv add nowhere"),
    (
        {"lora": {}, "trainer__trainable_rules": [["", True]]},
        "trainer.trainable_rules",
        "only the adapters are trained",
    ),
    (
        {"lora": {}, "trainer__trainer_type": "kto", "trainer__sync_ref_model": True},
        "trainer.sync_ref_model",
        "is its base, which is not trained",
    ),
    ({"loader": {"dtype": "bf61"}}, "loader.dtype", "did you mean 'bf16'?"),
    ({"loader": 3}, "loader", "must be a mapping of keys to values, got 3"),
    ({"model__config__model_type": "lama"}, "model.config.model_type", "did you mean 'llama'?"),
    ({"model__config__hidden_sise": 1}, "model.config.hidden_sise", "'hidden_size'"),
    ({"model__config__hidden_size": "big"}, "model.config.hidden_size", "must be an integer"),
    ({"model__config__hidden_size": 63}, "model.config.num_attention_heads", "does not divide"),
    ({"model__config__num_key_value_heads": 3}, "model.config.num_key_value_heads", "divide"),
    ({"model__config__model_type": ...}, "model.config", "'model_type' is missing"),
    ({"model__name_or_path": "x"}, "model", "either name_or_path"),
    ({"model__tokenizer": ...}, "model", "a new model has none"),
    ({"model__tokenizer": "./nowhere"}, "model.tokenizer", "no such directory"),
    ({"model__tokenizer": {"trian": {}}}, "model.tokenizer", "did you mean 'train'?"),
    ({"model__task": "causal"}, "model.task", "unknown task 'causal'"),
    ({"mixture__informs": []}, "mixture.informs", "at least 1"),
    ({"mixture__informs": [{"type": "jsn"}]}, "mixture.informs[0]", "did you mean 'json'?"),
    (
        {"mixture__informs": [{"data_files": "nowhere/*.jsonl"}]},
        "mixture.informs[0].data_files",
        "no such file: nowhere/*.jsonl",
    ),
    (
        {"mixture__informs": [{"type": "python", "data_files": "no_module:x"}]},
        "mixture.informs[0].data_files",
        "no module 'no_module'",
    ),
    (
        {"mixture__tokenization": {"tokenizer": "organisation/other"}},
        "mixture.tokenization.tokenizer",
        "is not the model's tokenizer",
    ),
    ({"trainer__save_directory": "/dev/null/x"}, "trainer.save_directory", "is a file"),
    ({"actions": [{"to_yaml": "/dev/null/x.yaml"}]}, "actions[0].to_yaml", "is a file"),
    ({"eval": {"include_path": ["nowhere"]}}, "eval.include_path[0]", "no such directory"),
    ({"mixture__batch_size": 0}, "mixture.batch_size", "greater than 0"),
    ({"sharding": {"axis_dims": [1, -1]}}, "sharding", "2 entries [1, -1], but there are 5 axes"),
    ({"sharding": {"axis_dims": [-1, -1, 1, 1, 1]}}, "sharding", "only one entry may be -1"),
    ({"base_config": {"values": {"attn_mechanism": "flsh"}}}, "attn_mechanism", "'flash'"),
    ({"base_config": {"values": {"hidden_sizee": 1}}}, "hidden_sizee", "'hidden_size'"),
    (
        {"base_config": {"values": {"bits": 4}}},
        "base_config.values.bits",
        "bits quantizes no weights here: write quantization: {model: {quantization_method: nf4}}",
    ),
    (
        {"model__config__quantization_config": {"dtype": "nf4"}},
        "model.config.quantization_config",
        "quantization_config quantizes no weights here",
    ),
    ({"esurge": {"page_sise": 3}}, "esurge.page_sise", "did you mean 'page_size'?"),
    ({"eval": {"temperatur": 0}}, "eval.temperatur", "did you mean 'temperature'?"),
    ({"actions": ["trainn"]}, "actions[0]", "unknown action 'trainn'; did you mean 'train'?"),
    ({"actions": [{"train": {"x": 1}}]}, "actions[0].train.x", "unknown key 'x'"),
    ({"actions": [{"serve": {"port": 99999}}]}, "actions[0].serve.port", "65535"),
    ({"actions": [{"serve": {"require_api_key": True}}]}, "actions[0].serve", "needs api_key"),
    ({"actions": ["eval"]}, "actions[0]", "no tasks are given"),
    ({"actions": [{"eval": {"tasks": ["heldout_clse"]}}]}, "tasks[0]", "'heldout_cloze'"),
    ({"actions": [{"to_yaml": None}]}, "actions[0].to_yaml", "'path' is missing"),
    ({"actions": [{"train": None, "eval": None}]}, "actions[0].eval", "several keys"),
    ({"actions": []}, "actions", "no action is given"),
    ({"actions": ...}, "", "no actions are given"),
    ({"mixture": ...}, "actions[1]", "'train' needs the section 'mixture'"),
    (
        {"mixture": ..., "trainer": ..., "actions": ["generate"]},
        "model.tokenizer.train",
        "the section 'mixture', which is missing",
    ),
    ({"config": {}}, "model", "is next to 'config'"),
]


@pytest.mark.parametrize(
    ("changes", "where", "words"), MISTAKES, ids=[f"{i}-{m[1]}" for i, m in enumerate(MISTAKES)]
)
def test_run_file_mistakes_raise_error_with_position(
    changes: dict[str, Any], where: str, words: str
) -> None:
    message = refuse(with_changes(**changes))
    line = next(line for line in message.splitlines() if words in line)
    place, _, rest = line.partition(": ")
    assert place.startswith("f:") or not where
    assert where in rest


def test_held_out_tasks_need_held_out_texts() -> None:
    eval_action = {"eval": {"tasks": ["heldout_cloze"]}}
    assert run(with_changes(actions=[eval_action]))
    message = refuse(with_changes(actions=[eval_action], mixture__eval_fraction=...))
    assert "heldout_cloze needs held-out texts" in message


def test_all_mistakes_at_once_with_line_column_and_caret() -> None:
    text = (
        "model:\n"
        "  config: {model_type: llama}\n"
        "  tokenizer: {train: {vocab_size: 12}}\n"
        "trainer:\n"
        "  learning_ratee: 1\n"
        "  optimizer: adamww\n"
        "shardin: {}\n"
        "actions: [trainn]\n"
    )
    assert refuse(text).splitlines() == [
        "f:3:35: model.tokenizer.train.vocab_size: must be greater than or equal to 259, got 12",
        "  3 |   tokenizer: {train: {vocab_size: 12}}",
        "    |                                   ^^",
        "f:5:3: trainer.learning_ratee: unknown key 'learning_ratee'; "
        "did you mean 'learning_rate'?",
        "  5 |   learning_ratee: 1",
        "    |   ^^^^^^^^^^^^^^",
        "f:6:14: trainer.optimizer: unknown optimizer 'adamww'; did you mean 'adamw'? "
        f"(known: {', '.join(OPTIMIZERS)})",
        "  6 |   optimizer: adamww",
        "    |              ^^^^^^",
        "f:7:1: shardin: unknown section 'shardin'; did you mean 'sharding'? (known: model, "
        "reference_model, teacher_model, reward_model, quantization, lora, loader, sharding, "
        "platform, base_config, mixture, trainer, esurge, training_engine, asynchronous, eval, "
        "actions)",
        "  7 | shardin: {}",
        "    | ^^^^^^^",
        "f:8:11: actions[0]: unknown action 'trainn'; did you mean 'train'? (known: validate, "
        "print, dump_config, to_json, to_yaml, train, eval, generate, transcribe, serve)",
        "  8 | actions: [trainn]",
        "    |           ^^^^^^",
        "5 errors in f",
    ]


def test_alias_error_uses_the_name_in_the_file() -> None:
    message = refuse(with_changes(esurge={"gpu_memory_utilization": 3}))
    assert "esurge.gpu_memory_utilization: must be less than or equal to 1, got 3" in message


def test_empty_and_non_mapping_run_files_raise_input_error() -> None:
    assert "is empty" in refuse("")
    assert "must be a mapping of sections, got list" in refuse("- 1\n")
    assert "must be a mapping of sections" in refuse("config: 3\nactions: train\n")


def test_dry_run_does_not_print_api_keys(capsys, tmp_path, monkeypatch):
    from ed_elarge.__main__ import run_file

    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    for keys in ("first-secret", ["first-secret", "other-secret"]):
        found = run({**GOOD, "actions": [{"serve": {"api_key": keys}}, "dump_config"]})
        file.write_text(found.to_yaml())
        assert "first-secret" in file.read_text()  # which is read back
        assert run_file(str(file), dry_run=True) == 0
        printed = capsys.readouterr()
        assert "secret" not in printed.out + printed.err
        assert "api_key" in printed.out


@pytest.mark.parametrize(
    ("trainer", "flags", "says"),
    [
        (
            {"total_batch_size": 8, "num_return_sequences": 4},
            "",
            "batch: 2 prompts and 8 completions in a step, per device 2 prompts and 8 completions; "
            "trainer.batch_unit: total_batch_size 8 counts completions",
        ),
        (
            {"total_batch_size": 8, "num_return_sequences": 4, "batch_unit": "prompts"},
            "--xla_force_host_platform_device_count=4",
            "batch: 8 prompts and 32 completions in a step, per device 2 prompts and 8 "
            "completions; trainer.batch_unit: total_batch_size 8 counts prompts",
        ),
        (
            {
                "trainer_type": "gfpo",
                "total_batch_size": 1,
                "num_return_sequences": 8,
                "num_remains_in_group": 2,
                "steps_per_generation": 3,
                "batch_unit": "prompts",
            },
            "--xla_force_host_platform_device_count=2",
            "batch: 1 prompt and 2 completions in a step (of 3 prompts and 24 sampled completions "
            "for 3 steps), per device 0.5 prompts and 1 completion; trainer.batch_unit: ",
        ),
        (
            {"trainer_type": "ppo", "total_batch_size": 4},
            "",
            "batch: 4 prompts and 4 completions in a step, per device 4 prompts and 4 completions",
        ),
    ],
)
def test_dry_run_says_the_prompts_and_completions_of_a_step(monkeypatch, trainer, flags, says):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    section = {"trainer_type": "grpo", "reward_functions": "number", **trainer}
    section |= {"save_directory": "out", "max_training_steps": 2}
    config = {**GOOD, "trainer": section, "mixture": {"informs": GOOD["mixture"]["informs"]}}
    description = describe_run_file(run({**config, "actions": ["train"]}))
    assert says in description
