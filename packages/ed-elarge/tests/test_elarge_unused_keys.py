"""Keys without effect cause a located warning, and names are checked before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge import eLargeModel
from ed_elarge.__main__ import run_file
from ed_elarge.building.parts import look_ahead
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.table import check_machine
from ed_elarge.errors import InputError
from run_files import GOOD, with_changes


def run(config: dict[str, Any]) -> RunConfig:
    return normalize(nodes.parse_yaml(yaml.safe_dump(config, sort_keys=False), "f"))


UNUSED: list[tuple[dict[str, Any], str]] = [
    ({"mixture__pack_tokens": False, "trainer__max_length": 64}, "mixture.pack_seq_length"),
    (
        {
            "mixture__pack_tokens": False,
            "trainer__max_length": 64,
            "mixture__pack_seq_length": ...,
            "mixture__pack_strategy": "greedy",
        },
        "mixture.pack_strategy",
    ),
    (
        {"mixture__pack_shuffle": False, "mixture__pack_shuffle_buffer_factor": 3},
        "mixture.pack_shuffle_buffer_factor",
    ),
    ({"mixture__stop_strategy": "all_exhausted"}, "mixture.stop_strategy"),
    (
        {"mixture__block_mixture": False, "mixture__mixture_block_size": 5},
        "mixture.mixture_block_size",
    ),
    ({"mixture__text_target_field": "x"}, "mixture.text_target_field"),
    (
        {"mixture__eval_fraction": ..., "trainer__evaluation_steps": 3},
        "trainer.evaluation_steps",
    ),
    ({"mixture__eval_fraction": ..., "trainer__eval_batch_size": 3}, "trainer.eval_batch_size"),
    ({"trainer__beta": 0.1}, "trainer.beta"),
    ({"trainer__kl_coef": 0.1}, "trainer.kl_coef"),
    ({"model__extra_kwargs": {"revision": "main"}}, "model.extra_kwargs.revision"),
    (
        {"esurge": {"strict_context": True, "truncate_mode": "right"}},
        "esurge.truncate_mode",
    ),
    ({"esurge": {"num_pages": 99, "gpu_memory_utilization": 0.5}}, "gpu_memory_utilization"),
    ({"eval": {"temperature": 0, "top_p": 0.5}}, "eval.top_p"),
    ({"eval": {"fewshot_as_multiturn": True}}, "eval.fewshot_as_multiturn"),
    ({"actions": [{"generate": {"top_k": 5}}]}, "actions[0].generate.top_k"),
    (
        {"base_config": {"values": {"moe_tiling_size_dim": 8}}},
        "base_config.values.moe_tiling_size_dim",
    ),
    ({"model__config__pallas_m_block_size": 64}, "model.config.pallas_m_block_size"),
]


@pytest.mark.parametrize(("changes", "where"), UNUSED, ids=[where for _, where in UNUSED])
def test_a_key_without_effect_is_warned_of_at_its_line(changes: dict[str, Any], where: str) -> None:
    checked = run(with_changes(**changes))
    texts = checked.warning_texts()
    (text,) = (text for text in texts if f"{where}: has no effect: " in text)
    line = int(text.split(":")[1])
    last = where.rpartition(".")[2]
    assert checked.document.line(line - 1).strip().startswith(last)


def test_a_whole_configuration_that_was_written_out_has_no_warnings() -> None:
    first = run(GOOD)
    again = normalize(nodes.parse_yaml(first.to_yaml()))
    assert not first.warnings
    assert not again.warnings


def test_the_command_line_and_python_show_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(with_changes(mixture__stop_strategy="all_exhausted")))
    assert run_file(str(path), dry_run=True) == 0
    shown = capsys.readouterr().err
    assert shown.startswith(f"warning: {path}:")
    assert "mixture.stop_strategy: has no effect: there are no mixture_weights" in shown
    with pytest.warns(UserWarning, match=r"mixture\.stop_strategy: has no effect"):
        eLargeModel(path)


LOOKED_UP: list[tuple[dict[str, Any], str, str]] = [
    ({"preprocessing_fn": "textwrap:dedentt"}, "preprocessing_fn", "did you mean 'dedent'?"),
    ({"preprocessing_fn": "no_such:f"}, "preprocessing_fn", "there is no module 'no_such'"),
    ({"format_callback": "json.nothing:f"}, "format_callback", "no module 'json.nothing'"),
    ({"data_files": "pydoc_data.topics:topic_s"}, "data_files", "did you mean 'topics'?"),
]


@pytest.mark.parametrize(("keys", "where", "words"), LOOKED_UP)
def test_functions_are_looked_up_without_importing_them(
    keys: dict[str, str], where: str, words: str
) -> None:
    inform = {"type": "python", "data_files": "pydoc_data.topics:topics", **keys}
    with pytest.raises(InputError) as error:
        check_machine(run(with_changes(mixture__informs=[inform])))
    assert f"mixture.informs[0].{where}: " in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("keys", "where", "words"),
    [
        ({"format_fields": {"txt": "content"}}, "format_fields", "did you mean 'text'"),
        ({"content_field": "txt"}, "content_field", "did you mean 'text'"),
        ({"content_field": "text", "preprocessing_fn": "json:tool"}, "preprocessing_fn", ""),
    ],
)
def test_fields_are_looked_up_in_the_first_row_of_every_source(
    tmp_path: Path, keys: dict[str, Any], where: str, words: str
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    for path in (good, bad):
        path.write_text(json.dumps({"text": "a b c"}) + "\n")
    informs = [{"data_files": str(good), "content_field": "text"}, {"data_files": str(bad), **keys}]
    checked = run(with_changes(mixture__informs=informs))
    checks = [look_ahead]
    if "preprocessing_fn" not in keys:  # no code of the user is imported
        checks.append(check_machine)
    for check in checks:
        with pytest.raises(InputError) as error:
            check(checked)
        assert f"mixture.informs[1].{where}: " in str(error.value)
        assert words in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_mesh_that_does_not_fit_is_found_before_the_data_is_read() -> None:
    inform = {"type": "python", "data_files": "no_such_module:texts"}
    changes = {"sharding": {"axis_dims": [3, 7, 1, 1, 1]}, "mixture__informs": [inform]}
    with pytest.raises(InputError, match=r"sharding\.axis_dims: .*21"):
        look_ahead(run(with_changes(**changes)))
