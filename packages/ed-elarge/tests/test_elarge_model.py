"""`eLargeModel`: setters, round trips and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from ed_elarge import eLargeModel
from ed_elarge.errors import InputError
from ed_infra.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like a model, as far as a configuration is concerned."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    for name in ("x.jsonl", "more.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model"


def test_the_guides_chain_of_setters(model: Path) -> None:
    elm = (
        eLargeModel.from_pretrained(str(model), task="causal-lm")
        .set_dtype(dtype="bf16", param_dtype="fp32")
        .set_sharding(axis_dims=(1, -1, 1, 1, 1))
        .set_operation_configs(attn_mechanism="flash")
        .set_esurge(max_model_len=4096, enable_prefix_caching=True)
        .set_mixture(batch_size=32, pack_tokens=False)
        .add_dataset(dataset_name="organisation/name", split="train", max_length=64)
        .add_dataset("more.jsonl", content_field="text")
        .set_eval(max_new_tokens=512, temperature=0.0)
        .set_trainer(trainer_type="sft", learning_rate=2e-5, num_train_epochs=3)
    )
    found = elm.validate().to_dict()
    assert found["model"]["task"] == "causal-language-model"
    assert found["loader"]["dtype"] == "bfloat16"
    assert found["loader"]["param_dtype"] == "float32"
    assert found["base_config"]["values"] == {"attn_mechanism": "flash"}
    assert found["mixture"]["informs"] == [
        {
            "type": "huggingface",
            "data_files": "organisation/name",
            "dataset_split_name": "train",
        },
        {"data_files": "more.jsonl", "content_field": "text"},
    ]
    assert found["mixture"]["tokenization"]["max_length"] == 64
    assert found["trainer"]["total_batch_size"] == 32
    assert elm.build_training_arguments().learning_rate == 2e-5
    assert "sft" in str(elm)


def test_files_and_dicts_say_the_same(model: Path, tmp_path: Path) -> None:
    elm = eLargeModel({"model": {"name_or_path": str(model)}}).set_trainer("sft", seed=3)
    elm.to_yaml(tmp_path / "a" / "config.yaml")
    elm.to_json(tmp_path / "config.json")
    expected = elm.to_dict()
    assert eLargeModel.from_yaml(tmp_path / "a" / "config.yaml").to_dict() == expected
    assert eLargeModel.from_json(tmp_path / "config.json").to_dict() == expected
    assert eLargeModel(expected).to_dict() == expected
    assert eLargeModel(str(tmp_path / "config.json")).to_dict() == expected


def test_a_setter_refuses_at_once(model: Path) -> None:
    elm = eLargeModel.from_pretrained(str(model))
    with pytest.raises(InputError, match=r"trainer\.learning_ratee.*'learning_rate'"):
        elm.set_trainer("sft", learning_ratee=1)
    with pytest.raises(InputError, match=r"loader\.dtype: unknown dtype 'bf61'"):
        elm.set_dtype("bf61")
    with pytest.raises(InputError, match="unknown section 'trainr'"):
        elm.update_config({"trainr": {}})
    # missing keys may follow later, and a rejected update changes nothing
    assert elm.set_mixture(batch_size=4).add_dataset("x.jsonl").to_dict()["mixture"]


def test_conflicting_batch_sizes_raise_input_error(model: Path) -> None:
    elm = eLargeModel.from_pretrained(str(model)).add_dataset("x.jsonl", max_length=8)
    elm.set_mixture(batch_size=4).set_trainer("sft", total_batch_size=8)
    with pytest.raises(InputError, match=r"differs from mixture\.batch_size"):
        elm.validate()


def test_missing_sections_raise_input_error() -> None:
    with pytest.raises(InputError, match="the section 'model' is missing"):
        eLargeModel().validate()
    with pytest.raises(InputError, match="the section 'trainer' is missing"):
        eLargeModel().build_training_arguments()


def test_a_data_function_is_written_by_its_name(model: Path) -> None:
    import textwrap

    elm = eLargeModel.from_pretrained(str(model))
    elm.add_dataset("x.jsonl", preprocessing_fn=textwrap.dedent)
    (inform,) = elm.to_dict()["mixture"]["informs"]
    assert inform["preprocessing_fn"] == "textwrap:dedent"


def test_auto_bind_reads_the_task_from_the_checkpoint(model: Path) -> None:
    (model / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}'
    )
    elm = eLargeModel.from_pretrained(str(model), task="auto-bind").set_trainer("sft")
    message = "names a model for 'sequence-classification', and sft trains models for"
    with pytest.raises(ConfigError, match=message):
        elm.build_model()
