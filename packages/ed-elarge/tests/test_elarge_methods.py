"""Constraints of a method on other sections: kind of rows, other models, actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ed_data import schema as schemas
from ed_data.errors import DataError
from ed_elarge import eLargeModel
from ed_elarge.errors import InputError
from ed_trainers.arguments import METHODS
from run_files import with_changes


def problems(**changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        eLargeModel(with_changes(**changes)).validate()
    return str(caught.value)


def test_every_kind_of_rows_is_a_schema() -> None:
    for entry in METHODS.values():
        assert isinstance(getattr(schemas, entry.rows.upper()), schemas.Schema)


def test_methods_report_missing_and_unused_model_sections() -> None:
    assert "distillation needs the section 'teacher_model'" in problems(
        trainer__trainer_type="distillation"
    )
    assert "sft does not read teacher_model (it reads no other model)" in problems(
        teacher_model__name_or_path="org/teacher"
    )
    said = problems(trainer__trainer_type="dpo", teacher_model__name_or_path="org/teacher")
    assert "dpo does not read teacher_model (it reads reference_model)" in said
    said = problems(trainer__trainer_type="dpo", reward_model__name_or_path="org/reward")
    assert "dpo does not read reward_model (it reads reference_model)" in said
    said = problems(
        mixture__pack_tokens=False,
        trainer__trainer_type="grpo",
        trainer__reward_functions=["exactt", "nowhere:f", "math:pii", {"number": {}}],
    )
    assert "reward_functions[0]: unknown reward function 'exactt'; did you mean 'exact'?" in said
    assert "reward_functions[1]: there is no module 'nowhere'" in said
    assert "reward_functions[3]" not in said
    said = problems(
        mixture__pack_tokens=False, trainer__trainer_type="xpo", trainer__judge="nowhere:judge"
    )
    assert "trainer.judge: there is no module 'nowhere'" in said
    said = problems(trainer__trainer_type="dpo", reference_model__name_or_path="./nowhere")
    assert "reference_model.name_or_path: no such directory" in said


def test_reward_functions_are_found_in_run_file_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, current = tmp_path / "project", tmp_path / "current"
    for folder in (project, current):
        folder.mkdir()
    monkeypatch.chdir(current)
    (project / "beside.py").write_text("def short(completions):\n    return [1.0]\n")
    names = ["beside.py:short", "beside:short", "beside.py:shrot", "absent.py:short", "absent:f"]
    changes: dict[str, Any] = {
        "mixture__pack_tokens": False,
        "trainer__trainer_type": "grpo",
        "trainer__reward_functions": names,
    }
    (project / "run.yaml").write_text(json.dumps(with_changes(**changes)))
    with pytest.raises(InputError) as caught:
        eLargeModel.from_yaml(project / "run.yaml").validate()
    said = str(caught.value)
    assert "reward_functions[0]" not in said and "reward_functions[1]" not in said
    assert "'beside.py' has no 'shrot'; did you mean 'short'?" in said
    searched = f"searched: {project}, {current}"
    assert f"reward_functions[3]: there is no file 'absent.py'; {searched}. Write" in said
    assert f"reward_functions[4]: there is no module 'absent'; {searched}, and the" in said


def test_generate_action_rejects_non_language_models() -> None:
    said = problems(trainer__trainer_type="reward", actions=["train", "generate"])
    assert "the model is for 'sequence-classification' and generates no text" in said


def test_prompt_methods_reject_packing() -> None:
    said = problems(trainer__trainer_type="seq_kd", teacher_model__name_or_path="org/teacher")
    assert "reads prompts, which are not packed" in said


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "no pair"}) + "\n")
    elm = eLargeModel(
        with_changes(
            trainer__trainer_type="dpo",
            trainer__save_directory=str(tmp_path / "run"),
            mixture__informs=[{"data_files": str(tmp_path / "texts.jsonl")}],
        )
    )
    with pytest.raises(DataError, match="there is no field 'prompt'"):
        elm.build_dataset()


@pytest.mark.nightly
def test_the_reference_of_the_section_is_the_one_that_is_read(tmp_path: Path) -> None:
    import jax
    import numpy as np
    from flax import nnx

    rows = [{"prompt": f"{i} + 1 =", "chosen": f" {i + 1}", "rejected": " no"} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes: dict[str, Any] = {
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "mixture__informs": [{"data_files": str(tmp_path / "pairs.jsonl")}],
        "mixture__cache_dir": str(tmp_path / "cache"),
        "mixture__eval_fraction": ...,
        "trainer__trainer_type": "dpo",
        "trainer__save_directory": str(tmp_path / "run"),
        "model__config__intermediate_size": 64,
        "model__config__num_hidden_layers": 1,
    }
    first = eLargeModel(with_changes(**changes, trainer__seed=1))
    first.build_model().save_pretrained(tmp_path / "reference")
    first.build_tokenizer().save_pretrained(tmp_path / "reference")
    second = eLargeModel(with_changes(**changes)).set_reference_model(str(tmp_path / "reference"))
    trainer = second.build_trainer()
    frozen = trainer.method.frozen
    reference = frozen.merge(frozen.leaves)["reference"]
    for kept, read in zip(
        jax.tree.leaves(nnx.state(first.build_model(), nnx.Param)),
        jax.tree.leaves(nnx.state(reference, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_array_equal(kept, read)
    assert second.build_reference_model() is second.part("reference")
