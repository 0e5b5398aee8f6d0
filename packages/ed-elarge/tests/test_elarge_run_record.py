"""The files that describe a run are written only by a run that trains."""

from __future__ import annotations

import functools
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge import eLargeModel
from ed_elarge.building.parts import list_settings
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import InputError
from run_files import run, small, with_changes, with_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_texts(tmp_path_factory.mktemp("records"))
    assert run(small_run(folder)) == 0
    return folder


def small_run(folder: Path, **changes: Any) -> dict[str, Any]:
    settings = small(folder, **{"actions": ["train"], **changes.pop("sections", {})})
    settings["trainer"] |= {"max_training_steps": 1, **changes}
    return settings


def read_files(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in (folder / "run").rglob("*") if p.is_file()}


def test_finished_run_keeps_its_record_and_its_summary(folder: Path) -> None:
    before = read_files(folder)
    assert {path.name for path in before} >= {"config.yaml", "environment.json", "report.html"}
    assert run(small_run(folder, log_steps=1)) == 0
    after = read_files(folder)
    assert [path.name for path in before if after[path] != before[path]] == []


def test_finished_run_with_another_learning_rate_is_refused_at_its_line(folder: Path) -> None:
    before = read_files(folder)
    with pytest.raises(InputError) as error:
        run(small_run(folder, learning_rate=0.5))
    assert "trainer.learning_rate" in str(error.value)
    assert "learning_rate 0.003 -> 0.5" in str(error.value)
    assert read_files(folder) == before


def test_refused_run_keeps_data_and_tokenizer_of_the_earlier_run(folder: Path) -> None:
    (folder / "other.jsonl").write_text(json.dumps({"text": "words of other data " * 400}) + "\n")
    settings = small_run(folder)
    settings["mixture"]["informs"] = [
        {"data_files": str(folder / "other.jsonl"), "content_field": "text"}
    ]
    del settings["mixture"]["eval_fraction"]
    before = read_files(folder)
    with pytest.raises(InputError, match=r"set another trainer\.save_directory"):
        run(settings)
    tokenizer = folder / "run" / "tokenizer"
    settings["model"]["tokenizer"] = str(tokenizer)
    with pytest.raises(InputError, match="was trained on other data"):
        run(settings)
    assert read_files(folder) == before


@pytest.mark.nightly
def test_evaluation_has_its_own_record(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    before = read_files(folder)
    sections = {"actions": ["eval"], "eval": {"tasks": ["heldout_perplexity"], "limit": 1}}
    sections["model"] = {"name_or_path": str(folder / "run" / "model")}
    assert run(small_run(folder, learning_rate=0.5, sections=sections)) == 0
    after = read_files(folder)
    assert {path: after[path] for path in before} == before
    names = {path.name for path in after if path not in before and path.name[:7] == "results"}
    assert names == {"results.json", "results.config.yaml", "results.environment.json"}


CHANGED_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("model.name_or_path", {"model__name_or_path": "b"}),
    ("model.tokenizer", {"model__tokenizer": "other"}),
    ("lora", {"lora": ...}),
    ("lora.alpha", {"lora__alpha": 3.0}),
    ("loader.dtype", {"loader__dtype": "bf16"}),
    ("quantization.model", {"quantization__model": {"method": "nf4"}}),
]


@pytest.mark.parametrize(("key", "changes"), CHANGED_SETTINGS, ids=[s[0] for s in CHANGED_SETTINGS])
def test_settings_contain_what_checkpoints_do_not(key: str, changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {"model__config": ..., "model__tokenizer": ...}
    base |= {"model__name_or_path": "a", "lora__rank": 4}

    def settings(**more: Any) -> dict[str, Any]:
        document = nodes.parse_yaml(json.dumps(with_changes(**base, **more)), "r.yaml")
        return json.loads(json.dumps(list_settings(normalize(document))))

    base_settings = settings()
    base = {name: value for name, value in base.items() if name not in changes}
    if changes == {"lora": ...}:
        del base["lora__rank"]
    changed = settings(**changes)
    names = [n for n, value in base_settings.items() if changed.get(n) != value]
    assert any(name.startswith(key) for name in names)


def test_record_names_functions_that_can_be_imported_again() -> None:
    """A function without an address is marked, and a record with such a mark is refused."""
    sections = {"model": {"name_or_path": "a/b"}, "trainer": {"trainer_type": "sft"}}

    def read(function: object) -> eLargeModel:
        inform = {"data_files": "a.json", "format_callback": function}
        return eLargeModel({**sections, "mixture": {"informs": [inform]}})

    def recorded(elm: eLargeModel) -> str:
        return yaml.safe_load(elm.config.to_yaml())["mixture"]["informs"][0]["format_callback"]

    assert recorded(read(textwrap.dedent)) == "textwrap:dedent"
    for function in (lambda row: row, functools.partial(textwrap.dedent)):
        with pytest.warns(UserWarning, match=r"format_callback: .*run cannot be repeated from it"):
            text = recorded(read(function))
        assert text.endswith("cannot be repeated>") and "0x" not in text
        with pytest.raises(InputError, match="define it in a file"):
            read(text)
