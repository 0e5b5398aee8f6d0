"""Rows and objects that Python code gives to trainers and to `eLargeModel.train`."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import easydel as ed
import numpy as np
import pytest
from ed_elarge.building.given_rows import prepare_rows
from ed_infra.errors import ConfigError
from ed_trainers.given import ROWS_GROUP, CollatedRows, has_rows, merge_names, prepare_datasets

TEXTS = [{"text": f"the number {i} and an answer {i + 1}"} for i in range(12)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
    for i in range(12)
]
PAIRS = [{"prompt": f"{i}? ", "chosen": f"{i}!", "rejected": "no"} for i in range(12)]
PROMPTS = [{"prompt": f"number {i}"} for i in range(12)]
BATCH = {"input_ids": np.zeros((2, 3), np.int32), "labels": np.zeros((2, 3), np.int32)}
#: Method, rows, keys of the trainer.
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "texts": ("sft", TEXTS, {"dataset_text_field": "text", "max_length": 24}),
    "packed texts": (
        "sft",
        TEXTS,
        {"dataset_text_field": "text", "packing": True, "max_length": 48},
    ),
    "chats": ("sft", CHATS, {"max_length": 48}),
    "answers": (
        "sft",
        [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS],
        {"max_length": 24},
    ),
    "pairs": ("dpo", PAIRS, {"max_length": 24}),
    "labels": ("kto", [{**p, "completion": p["chosen"], "label": True} for p in PAIRS], {}),
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def build_run(model: Path, method: str, keys: dict[str, Any], folder: Path) -> ed.eLargeModel:
    trainer = {"trainer_type": method, "total_batch_size": 4, "max_training_steps": 3, **keys}
    return ed.eLargeModel(
        {
            "model": {"name_or_path": str(model)},
            "loader": {"dtype": "fp32", "param_dtype": "fp32"},
            "mixture": {
                "informs": [{"type": "json", "data_files": str(folder / "rows.json")}],
                "cache_dir": str(folder / "cache"),
            },
            "trainer": {**trainer, "save_directory": str(folder / "run")},
        }
    )


def read_batches(loader: Any) -> list[dict[str, np.ndarray]]:
    return [dict(loader.batch_at(step)) for step in range(4)]


def build_arguments(method: str, keys: dict[str, Any], folder: Path) -> Any:
    from ed_trainers.arguments import METHODS

    options = {
        "total_batch_size": 4,
        "max_training_steps": 3,
        "save_directory": str(folder),
        **keys,
    }
    return METHODS[method].arguments(**options)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_python_and_of_a_run_file_give_equal_batches(
    case: str, quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset

    monkeypatch.setenv("ED_DATA_CACHE", str(tmp_path / "cache"))
    method, rows, keys = CASES[case]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    run = build_run(quickstart_model, method, keys, tmp_path)
    tokenizer = run.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    expected = read_batches(run.build_dataset())
    config = ed.AutoEasyDeLConfig.from_pretrained(quickstart_model)
    model: Any = SimpleNamespace(config=config, model_task=ed.TaskType.CAUSAL_LM)
    arguments = build_arguments(method, keys, tmp_path / "python")
    for given in (rows, tuple(rows), Dataset.from_list(rows)):
        loader, held_out, rollout, _ = prepare_rows(arguments, model, tokenizer, given, None)
        assert held_out is None and rollout is None
        for batch, other in zip(read_batches(loader), expected, strict=True):
            assert batch.keys() == other.keys()
            for name, array in batch.items():
                np.testing.assert_array_equal(array, other[name])


def test_a_dataset_object_adds_a_source_that_equals_a_file(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas as pd
    from datasets import Dataset

    monkeypatch.setenv("ED_DATA_CACHE", str(tmp_path / "cache"))
    rows = [{**row, "note": "x" if i else None} for i, row in enumerate(TEXTS)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    dataset = Dataset.from_list(rows)
    expected = None
    sources = (str(tmp_path / "rows.json"), rows, dataset, pd.DataFrame(rows), dataset.data.table)
    sections = build_run(quickstart_model, "sft", {}, tmp_path).to_sections()
    del sections["mixture"]
    for source in sources:
        run = ed.eLargeModel(sections).add_dataset(source, content_field="text", max_length=24)
        run.add_dataset([{"text": "a further row"}])
        other = run.with_engine_options({"max_num_seqs": 2})
        del run
        batches = read_batches(other.build_dataset())
        expected = expected or batches
        for batch, wanted in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(batch["input_ids"], wanted["input_ids"])
    stream = ed.eLargeModel(sections).add_dataset(dataset.to_iterable_dataset())
    assert stream.config.mixture is not None and stream.config.mixture.streaming


def test_rows_of_a_wrong_type_are_shortened_in_the_error() -> None:
    with pytest.raises(ValueError, match="must be a path, a list of paths") as caught:
        ed.eLargeModel().add_dataset({"a": {"b": ["text"] * 10_000}})
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="characters are left out") as caught:
        ed.eLargeModel({"trainer": {"trainer_type": "x" * 100_000}})
    assert len(str(caught.value)) < 5000


def test_iterable_datasets_are_streamed_and_read_again(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer

    monkeypatch.setenv("ED_DATA_CACHE", str(tmp_path / "cache"))
    config = ed.AutoEasyDeLConfig.from_pretrained(quickstart_model)
    model: Any = SimpleNamespace(config=config, model_task=ed.TaskType.CAUSAL_LM)
    arguments = build_arguments("sft", {"max_length": 24}, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(quickstart_model)
    stream = Dataset.from_list(TEXTS).to_iterable_dataset()
    assert has_rows(stream)
    loader, *_ = prepare_rows(arguments, model, tokenizer, stream, None)
    batches: Any = iter(loader)  # type: ignore[arg-type]
    assert [next(batches)["input_ids"].shape for _ in range(5)] == [(4, 24)] * 5
    with pytest.raises(ValueError, match="can be read only once"):
        prepare_rows(arguments, model, tokenizer, iter(TEXTS), None)


def test_a_dataset_of_rows_differs_from_batches() -> None:
    batch = BATCH
    assert has_rows(TEXTS) and has_rows(["a text"]) and has_rows([{"input_ids": [1, 2]}])
    assert not has_rows([batch]) and not has_rows(None)
    assert not has_rows(CollatedRows(TEXTS, lambda rows: batch, 4, None))


def test_arguments_of_trainers_have_the_names_of_easydel_and_trl() -> None:
    reward, model = (lambda completions: [0.0]), object()
    out = merge_names(
        {"arguments": None, "model": None, "frozen": None, "reward_functions": ()},
        {"args": 1, "student_model": 2, "ref_model": model, "reward_funcs": reward},
    )
    assert out == {
        "arguments": 1,
        "model": 2,
        "frozen": {"reference": model},
        "reward_functions": (reward,),
    }
    with pytest.raises(ConfigError, match="args and arguments are one argument"):
        merge_names({"arguments": 1}, {"args": 2})
    with pytest.raises(ConfigError, match=r"ref_model and frozen\['reference'\] are one model"):
        merge_names({"frozen": {"reference": model}}, {"ref_model": model})
    with pytest.raises(ConfigError, match=r"teacher_mode.*did you mean 'teacher_model'"):
        merge_names({"arguments": None}, {"teacher_mode": model})


def test_collated_rows_are_a_function_of_seed_and_step() -> None:
    def collate(rows: list[Any]) -> dict[str, np.ndarray]:
        return {"numbers": np.array([TEXTS.index(row) for row in rows])}

    loader, again = (CollatedRows(TEXTS, collate, 5, 3) for _ in range(2))
    assert loader.steps_per_epoch == 2
    for step in (0, 1, 2, 7):
        np.testing.assert_array_equal(
            loader.batch_at(step)["numbers"], again.batch_at(step)["numbers"]
        )
    first_epoch = [*loader.batch_at(0)["numbers"], *loader.batch_at(1)["numbers"]]
    assert len({*first_epoch}) == 10
    with pytest.raises(ConfigError, match="12 rows, and a batch has 13"):
        CollatedRows(TEXTS, collate, 13, None)


def test_keys_of_the_data_stay_with_the_arguments() -> None:
    arguments = ed.SFTConfig(packing=True, dataset_text_field="text", max_length=8)
    assert arguments.data_keys == {"packing": True, "dataset_text_field": "text"}
    assert arguments.replace(max_length=16).data_keys == arguments.data_keys
    assert ed.SFTConfig().data_keys == {}
    assert ed.GRPOConfig(esurge_page_size=16).data_keys == {"esurge_page_size": 16}
    with pytest.warns(UserWarning, match="max_length limits a prompt with its answer"):
        ed.DPOConfig(max_length=32, max_prompt_length=16, max_completion_length=16)
    assert ed.SFTConfig(use_wandb=True).report_to == ("wandb",)
    with pytest.raises(
        ConfigError,
        match="packing, dataset_text_field: keys for rows, and train_dataset has batches",
    ):
        prepare_datasets(arguments, cast(Any, None), None, ([BATCH], None), None)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "distillation"])
def test_training_on_rows_equals_training_by_a_run_file(
    method: str, quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not metadata.entry_points(group=ROWS_GROUP):
        pytest.skip(f"the installed ed-elarge has no entry point {ROWS_GROUP}: run uv sync")
    monkeypatch.setenv("ED_DATA_CACHE", str(tmp_path / "cache"))
    rows = {"sft": TEXTS, "dpo": PAIRS, "grpo": PROMPTS, "distillation": TEXTS}[method]
    keys: dict[str, Any] = {"max_length": 24}
    if method == "grpo":
        keys = {"max_prompt_length": 12, "max_completion_length": 4, "num_generations": 2}
    field = {"sft": "text", "distillation": "text", "grpo": "prompt"}.get(method)
    named = {} if field is None else {"dataset_text_field": field}
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    run = build_run(quickstart_model, method, {**keys, **named}, tmp_path)
    if method == "distillation":
        run.set_teacher_model(str(quickstart_model))

    def reward(completions: list[Any], **columns: object) -> list[float]:
        return [float(len(str(one))) for one in completions]

    first = run.train(reward_funcs=reward) if method == "grpo" else run.train()
    dtypes: dict[str, Any] = {"dtype": "float32", "param_dtype": "float32"}
    model, other = (
        ed.AutoEasyDeLModelForCausalLM.from_pretrained(quickstart_model, **dtypes) for _ in "ab"
    )
    others: dict[str, Any] = {"grpo": {"reward_funcs": reward}}.get(method, {})
    if method == "distillation":
        others = {"teacher_model": other}
    trainer = ed.trainer_class(method)(
        arguments=build_arguments(method, keys, tmp_path / "python"),
        model=model,
        train_dataset=rows,
        processing_class=run.build_tokenizer(),
        **others,
    )
    second = trainer.train()
    assert second.metrics["train_loss"] == first.metrics["train_loss"]
