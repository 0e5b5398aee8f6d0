"""Run files whose merges, aliases, includes and variables would need exponential time."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ed_elarge.config import nodes
from ed_elarge.config.config_source import config_fields
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import InputError
from maximal_run_file import dry_run


def merges(levels: int, width: int) -> str:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    for level in range(1, levels):
        sources = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {{<<: [{sources}], k{level}: 1}}")
    return "\n".join(lines)


def test_nested_merges_are_read_once() -> None:
    value = nodes.parse_yaml(merges(40, 4)).value
    assert value["a39"] == {"x": 1, "y": 2} | {f"k{level}": 1 for level in range(1, 40)}


def test_earlier_merges_and_explicit_keys_take_precedence() -> None:
    text = (
        "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {<<: [*a, *b], y: 3}\nd: {<<: {<<: *b, x: 5}}"
    )
    value = nodes.parse_yaml(text).value
    assert value["c"] == {"y": 3, "x": 1, "z": 2}
    assert value["d"] == {"x": 5, "z": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a {x: 1, <<: *a}", "contains it"),
        ("a: &a {x: {<<: *a}}", "contains it"),
        (
            "\n".join(["a: &a {" + ", ".join(f"k{i}: 1" for i in range(2000)) + "}"])
            + "\nb: {<<: ["
            + ", ".join(["*a"] * 2000)
            + "]}",
            "merges more than",
        ),
        (
            "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 3000))]),
            "levels deep",
        ),
        (
            "\n".join(
                ["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
            ),
            "aliases make more than",
        ),
    ],
)
def test_expanding_aliases_are_errors(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        nodes.parse_yaml(text)


def test_unfinished_variables_are_read_in_linear_time() -> None:
    text = "${env:A:-" * 100_000
    assert nodes.parse_yaml(f"a: '{text}'").value == {"a": text}
    assert nodes.parse_yaml("a: ${env:ED_UNSET:-b$c}").value == {"a": "b$c"}


@pytest.mark.parametrize(
    "kind", ["a" * 5000, "_" * 5000, "é" * 200, "../" * 90 + "etc", {"a": "b" * 300}, ["a" * 300]]
)
def test_long_model_types_are_errors_of_the_run_file(kind: object) -> None:
    """Transformers has a folder for each model type, and names of folders have a limit."""
    run = {"model": {"config": {"model_type": kind}}, "actions": ["validate"]}
    with pytest.raises(InputError) as caught:
        normalize(nodes.parse_yaml(yaml.safe_dump(run)), require_actions=True)
    assert len(str(caught.value)) < 20_000
    assert config_fields(str(kind)) is None


def test_each_included_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in range(30):
        below = f"include: [f{level + 1}.yaml, f{level + 1}.yaml]\n" if level < 29 else ""
        (tmp_path / f"f{level}.yaml").write_text(f"{below}k{level}: {level}\n")
    reads: list[Path] = []
    read = nodes._read_file
    monkeypatch.setattr(nodes, "_read_file", lambda path: reads.append(path) or read(path))
    assert nodes.read_yaml(tmp_path / "f0.yaml").value == {
        f"k{level}": level for level in range(30)
    }
    assert len(reads) == 30


@pytest.mark.parametrize("width", [1, 3])
def test_many_includes_are_an_error(tmp_path: Path, width: int) -> None:
    for level in range(2000):
        names = ", ".join([f"f{level + 1}.yaml"] * width)
        (tmp_path / f"f{level}.yaml").write_text(f"include: [{names}]\n")
    with pytest.raises(InputError, match="more than 64 paths in include"):
        nodes.read_yaml(tmp_path / "f0.yaml")


def test_including_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: b.yaml")
    (tmp_path / "b.yaml").write_text("include: a.yaml")
    with pytest.raises(InputError, match="includes itself"):
        nodes.read_yaml(tmp_path / "a.yaml")


def test_large_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: " + b"1" * 2**20)
    with pytest.raises(InputError, match="has more than"):
        nodes.read_yaml(tmp_path / "a.yaml")


#: Names that no file can have, or whose user does not exist.
NAMES = {
    "long": "a" * 5000,
    "long part": "b/" * 9 + "c" * 300,
    "NUL": "a\0b",
    "user": "~nobody-9/x",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "key",
    [
        "include",
        "model",
        "tokenizer",
        "data_files",
        "save_directory",
        "include_path",
        "local_tasks",
    ],
)
def test_names_that_no_file_can_have_are_errors_without_a_traceback(
    key, name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = {
        "model": {"name_or_path": str(tmp_path)},
        "mixture": {"informs": [{"data_files": "rows.jsonl", "content_field": "text"}]},
        "trainer": {"trainer_type": "sft", "save_directory": str(tmp_path / "run")},
        "actions": ["train"],
    }
    value = NAMES[name]
    if key == "include":
        config["include"] = value
    elif key == "model":
        config["model"]["name_or_path"] = value
    elif key == "tokenizer":
        config["tokenizer"] = {"name_or_path": value}
    elif key == "data_files":
        config["mixture"]["informs"][0]["data_files"] = value
    elif key == "save_directory":
        config["trainer"]["save_directory"] = str(tmp_path) + "/" + value
    elif key == "include_path":
        config["eval"] = {"include_path": [value], "tasks": ["piqa"]}
    else:
        config["eval"] = {"local_tasks": [{"name": "a", "data_files": value}]}
    text = yaml.safe_dump(config)
    code, output = dry_run(text)
    assert code == 2, output
    assert "Traceback" not in output
    assert len(output) < 60_000
