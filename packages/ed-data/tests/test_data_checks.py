"""Checks before slow work: unresolved names, and keys without effect."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ed_data import DataError, Mixture, build_loader, check_names, idle_options
from ed_data.schema import PREFERENCE, PROMPT

JSON = {"type": "json", "data_files": "train/*.json", "name": "a"}


def test_checks_import_no_heavy_modules(jsonl):
    code = (
        "import sys; from ed_data import Mixture, check_names, idle_options; "
        f"inform = {{'data_files': {jsonl()!r}, 'preprocessing_fn': 'os.path:join'}}; "
        "m = Mixture(informs=[inform]); "
        "assert check_names(m) == idle_options(m) == []; "
        "heavy = {'jax', 'transformers', 'datasets', 'tokenizers', 'torch'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jso:loads", "there is no module 'jso'; did you mean 'json'"),
        ("json.decode:loads", "there is no module 'json.decode'; did you mean 'json.decoder'"),
        ("json.decoder.x:loads", "'json.decoder' is a module, not a package"),
        ("json:load_s", "the module 'json' exists and has no 'load_s'; did you mean 'loads'"),
        ("builtins:str.uper", "'str' exists and has no 'uper'; did you mean 'upper'"),
        ("json:__name__", "must be a function, got a str"),
        ("failing_on_import:f", "fails with ValueError: at line one"),
        ("wanting:f", "fails with ModuleNotFoundError: No module named 'absent_here'"),
    ],
)
def test_check_names_reports_functions_that_cannot_be_imported(
    mixture, jsonl, tmp_path, monkeypatch, name, says
):
    (tmp_path / "failing_on_import.py").write_text("raise ValueError('at line one')")
    (tmp_path / "wanting.py").write_text("import absent_here")
    monkeypatch.syspath_prepend(tmp_path)
    good = {"data_files": jsonl()}
    for key in ("format_callback", "preprocessing_fn"):
        made = mixture(informs=[good, {**good, key: name}])
        ((path, message),) = check_names(made)
        assert path == ("informs", 1, key)
        assert says in message
    made = mixture(informs=[good], eval_informs=[{**good, "preprocessing_fn": name}])
    assert [path for path, _ in check_names(made)] == [("eval_informs", 0, "preprocessing_fn")]


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        ({"content_field": "contents"}, "content_field", "did you mean 'content'"),
        ({"format_fields": {"Content": "text"}}, "format_fields", "did you mean 'content'"),
        ({"additional_fields": ["id"]}, "additional_fields", "(fields: content)"),
        ({"data_files": "absent.jsonl"}, "data_files", "no file matches"),
        ({"type": "python", "data_files": "os.pth:join"}, "data_files", "no module 'os.pth'"),
    ],
)
def test_check_names_looks_up_fields_in_the_first_row(mixture, jsonl, options, key, says):
    made = mixture(informs=[{"data_files": jsonl(), **options}])
    ((path, message),) = check_names(made)
    assert path == ("informs", 0, key)
    assert says in message


def test_format_callback_may_create_the_fields(mixture, jsonl):
    informs = [{"data_files": jsonl(), "content_field": "x", "format_callback": "copy:copy"}]
    assert check_names(mixture(informs=informs)) == []
    assert [path for path, _ in check_names(mixture(), PREFERENCE)] == [
        ("informs", 0, "content_field")
    ]


def test_unresolved_names_are_rejected_before_tokenization(mixture, jsonl, tokenizer, tmp_path):
    informs = [{"data_files": jsonl()}, {"data_files": jsonl(), "content_field": "contnt"}]
    with pytest.raises(DataError, match="did you mean 'content'") as error:
        build_loader(mixture(informs=informs), tokenizer)
    assert error.value.path == ("informs", 1, "content_field")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"pack_strategy": "greedy"}, ["pack_strategy"]),
        ({"pack_seq_length": 8, "pack_shuffle": False}, ["pack_seq_length", "pack_shuffle"]),
        ({"pack_tokens": True, "pack_strategy": "greedy", "pack_seq_length": 8}, []),
        (
            {"pack_tokens": True, "pack_shuffle": False, "pack_shuffle_buffer_factor": 2},
            ["pack_shuffle_buffer_factor"],
        ),
        ({"block_mixture": False, "mixture_block_size": 8}, ["mixture_block_size"]),
        ({"stop_strategy": "longest"}, ["stop_strategy"]),
        ({"mixture_weights": {"a": 2.0}}, ["mixture_weights"]),
        ({"prefetch_workers": 0, "prefetch_buffer_size": 8}, ["prefetch_buffer_size"]),
        ({"prefetch_workers": 3, "prefetch_buffer_size": 0}, ["prefetch_workers"]),
        ({"pack_on_the_fly": True, "cache_dir": "x"}, ["cache_dir"]),
        ({"pack_on_the_fly": True, "cache_remote_files": True}, ["cache_remote_files"]),
        ({"text_target_field": "x"}, ["text_target_field"]),
        ({"text_target_field": "x", "save": {"path": "x"}}, []),
        (
            {"text_target_field": "x", "save": {"path": "x"}, "pack_tokens": True},
            ["text_target_field"],
        ),
        ({"tokenization": {"output_field": "x"}}, ["tokenization.output_field"]),
        ({"informs": [{**JSON, "additional_fields": ["b"]}]}, ["informs.0.additional_fields"]),
        (
            {"eval_informs": [{**JSON, "additional_fields": ["b"]}]},
            ["eval_informs.0.additional_fields"],
        ),
    ],
)
def test_idle_options_names_options_without_effect(options, keys):
    remarks = idle_options(Mixture(**{"informs": [JSON], **options}))
    assert [".".join(map(str, path)) for path, _ in remarks] == keys
    assert all("no effect: " in reason for _, reason in remarks)


def test_explicit_default_is_reported_and_fields_of_the_schema_are_not():
    made = Mixture(informs=[JSON], pack_strategy="bfd")
    assert idle_options(made) == [
        (("pack_strategy",), "pack_strategy has no effect: pack_tokens is off")
    ]
    pairs = Mixture(informs=[{**JSON, "additional_fields": ["chosen", "rejected"]}])
    assert idle_options(pairs, PREFERENCE) == []
    assert idle_options(pairs, PROMPT) == [], "prompts bring their fields along"
