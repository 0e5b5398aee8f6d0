"""Options: documented names are accepted, and other names are rejected with a suggestion."""

from __future__ import annotations

import subprocess
import sys

import pytest
from ed_data import Inform, Mixture, Saving, Tokenization
from pydantic import ValidationError

JSON = {"type": "json", "data_files": "train/*.json"}


def problem(make) -> str:
    with pytest.raises(ValidationError) as error:
        make()
    return str(error.value)


def test_options_import_no_heavy_modules():
    code = (
        "import sys, ed_data, ed_data.config; ed_data.Mixture; "
        "heavy = {'jax', 'transformers', 'datasets', 'tokenizers', 'numpy', 'pyarrow', 'fsspec'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_package_lists_its_names_and_suggests_the_nearest():
    import ed_data

    assert set(ed_data.__all__) <= set(dir(ed_data))
    for name in ed_data.__all__:
        assert getattr(ed_data, name) is not None
    with pytest.raises(AttributeError, match="did you mean 'build_loader'"):
        ed_data.build_loadr  # noqa: B018


def test_documented_mixture_block_is_valid():
    mixture = Mixture(
        informs=[
            {**JSON, "content_field": "text", "split": "train"},
            {
                "type": "parquet",
                "data_files": ["data/part1.parquet", "data/part2.parquet"],
                "content_field": "content",
                "additional_fields": ["metadata", "source"],
            },
            {
                "type": "databricks/dolly-15k",
                "dataset_split_name": "train",
                "content_field": "text",
                "num_rows": 10000,
                "format_fields": {"question": "prompt", "answer": "response"},
            },
        ],
        batch_size=32,
        shuffle_buffer_size=10000,
        seed=42,
        pack_tokens=True,
        pack_seq_length=2048,
        pack_eos_token_id=2,
        pack_shuffle=True,
        pack_shuffle_buffer_factor=10,
        pack_on_the_fly=True,
        block_mixture=True,
        mixture_block_size=1000,
        stop_strategy="first_exhausted",
        prefetch_workers=4,
        prefetch_buffer_size=100,
        cache_remote_files=True,
        tokenization={"max_length": 2048, "truncation": True, "padding": "max_length"},
        save={"path": "./processed_dataset", "format": "parquet"},
    )
    assert [inform.label for inform in mixture.informs] == [
        "train",
        "part1",
        "databricks/dolly-15k",
    ]
    assert mixture.informs[2].kind == "huggingface"


def test_option_aliases_resolve_to_canonical_values():
    assert Mixture(informs=[JSON], stop_strategy="longest").stop_strategy == "all_exhausted"
    assert Saving(output_path="x").path == "x"
    assert Tokenization(padding=True).padding == "longest"
    assert Inform(type="jsonl", data_files="a").kind == "json"
    assert Inform(type="hf", data_files="squad").dataset_id == "squad"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.json", "json"),
        ("a.jsonl.gz", "json"),
        ("a.parquet", "parquet"),
        ("a.CSV", "csv"),
        ("a.tsv.gz", "tsv"),
        ("a.txt", "txt"),
        ("a.arrow", "arrow"),
    ],
)
def test_file_suffix_determines_type(path, kind):
    assert Inform(data_files=path).kind == kind


def test_unknown_key_error_suggests_the_nearest_key():
    assert "unknown key 'pack_token'; did you mean 'pack_tokens'?" in problem(
        lambda: Mixture(informs=[JSON], pack_token=True)
    )
    text = problem(lambda: Mixture(informs=[{**JSON, "content_fild": "text"}]))
    assert "informs.0.content_fild" in text
    assert "did you mean 'content_field'?" in text
    assert "tokenization.max_lenght" in problem(
        lambda: Mixture(informs=[JSON], tokenization={"max_lenght": 3})
    )
    assert "remove one of them" in problem(lambda: Saving(path="a", output_path="a"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"informs": []}, "at least 1 item"),
        ({"informs": [{"type": "jsn", "data_files": "a"}]}, "did you mean 'json'"),
        ({"informs": [{"data_files": "a.xyz"}]}, "set type"),
        ({"informs": [{"type": "json"}]}, "requires data_files"),
        ({"informs": [{"type": "huggingface"}]}, "requires its id"),
        ({"informs": [{"type": "python", "data_files": "a.b"}]}, "module:attribute"),
        ({"informs": [{**JSON, "split": "test"}]}, "files have only the split"),
        (
            {"informs": [{"type": "json", "data_files": {"train": "a"}, "split": "trian"}]},
            "did you mean 'train'",
        ),
        ({"informs": [{**JSON, "dataset_split_name": "train"}]}, "Hugging Face"),
        ({"informs": [{**JSON, "sample_by": "line"}]}, "type txt"),
        ({"informs": [JSON], "eval_fraction": 1.5}, "less than 1"),
        ({"informs": [{"data_files": 3}]}, "a list of paths"),
        ({"informs": [{"data_files": {"train": {"a": "b"}}}]}, "a mapping from splits"),
        ({"informs": [{**JSON, "format_callback": "f"}]}, "'path/file.py:function', got 'f'"),
        ({"informs": [JSON], "mixture_weights": {"trian": 1}}, "did you mean 'train'"),
        ({"informs": [JSON], "mixture_weights": {"train": 0}}, "must be greater than 0"),
        ({"informs": [JSON, JSON], "mixture_weights": {"train": 1}}, "set different names"),
        (
            {"informs": [JSON, {**JSON, "name": "b"}], "mixture_weights": {"b": 1}},
            "'train' has no weight",
        ),
        (
            {
                "informs": [JSON],
                "pack_tokens": True,
                "pack_seq_length": 8,
                "tokenization": {"max_length": 9},
            },
            "exceeds pack_seq_length=8",
        ),
        (
            {"informs": [JSON], "pack_tokens": True, "tokenization": {"padding": "longest"}},
            "requires pack_tokens: false",
        ),
        ({"informs": [JSON], "tokenization": {"padding": False}}, "rows of a batch must be padded"),
        (
            {"informs": [JSON], "tokenization": {"max_length": 3, "truncation": False}},
            "disables truncation",
        ),
        ({"informs": [JSON], "save": {"path": "x", "compression": "gzp"}}, "did you mean 'gzip'"),
    ],
)
def test_invalid_mixture_options_raise_error_with_reason(options, says):
    assert says in problem(lambda: Mixture(**options))


def test_options_are_immutable_and_replaceable():
    mixture = Mixture(informs=[JSON])
    with pytest.raises(ValidationError):
        mixture.seed = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert mixture.replace(seed=3).seed == 3


def places(make) -> list[str]:
    with pytest.raises(ValidationError) as error:
        make()
    errors = [e for e in error.value.errors(include_url=False) if e["type"] != "too_short"]
    return [".".join(map(str, e["loc"])) for e in errors]


@pytest.mark.parametrize(
    "options",
    [
        {"seed": True},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": float("inf")},
        {"batch_size": True},
        {"batch_size": 10**9},
        {"eval_fraction": float("nan")},
        {"eval_fraction": True},
        {"shuffle_buffer_size": 10**15},
        {"shuffle_buffer_size": float("inf")},
        {"pack_seq_length": 10**9},
        {"pack_seq_length": True},
        {"pack_eos_token_id": 10**12},
        {"pack_shuffle_buffer_factor": 10**9},
        {"mixture_block_size": 10**15},
        {"prefetch_workers": 10**6},
        {"prefetch_buffer_size": 10**9},
    ],
)
def test_numeric_options_reject_booleans_and_values_out_of_bounds(options):
    assert places(lambda: Mixture(informs=[JSON], **options)) == [*options]


def test_numeric_options_of_nested_sections_have_bounds():
    assert places(
        lambda: Mixture(
            informs=[{**JSON, "num_rows": True}],
            mixture_weights={"train": True},
            tokenization={"max_length": 10**9, "batch_size": float("inf")},
            save={"path": "x", "num_shards": 10**6},
        )
    ) == [
        "informs.0.num_rows",
        "mixture_weights.train",
        "tokenization.max_length",
        "tokenization.batch_size",
        "save.num_shards",
    ]
    assert places(lambda: Mixture(informs=[JSON], mixture_weights={"train": float("inf")})) == [
        "mixture_weights.train"
    ]
    assert "must be a number, got true" in problem(lambda: Mixture(informs=[JSON], seed=True))


@pytest.mark.parametrize(("key", "hint"), [("SEED", "seed"), ("Pack-Tokens", "pack_tokens")])
def test_nearest_key_ignores_case_and_hyphens(key, hint):
    assert f"did you mean '{hint}'?" in problem(lambda: Mixture(informs=[JSON], **{key: 1}))


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"informs": [{"type": "jsn", "data_files": "a"}]}, "informs.0.type"),
        ({"informs": [{"data_files": "a.xyz"}]}, "informs.0.data_files"),
        ({"informs": [{"type": "python", "data_files": "a.b"}]}, "informs.0.data_files"),
        ({"informs": [{**JSON, "split": "test"}]}, "informs.0.split"),
        ({"informs": [{**JSON, "dataset_split_name": "x"}]}, "informs.0.dataset_split_name"),
        ({"informs": [{**JSON, "sample_by": "line"}]}, "informs.0.sample_by"),
        ({"informs": [{**JSON, "format_fields": {"a": "c", "b": "c"}}]}, "informs.0.format_fields"),
        ({"informs": [JSON], "mixture_weights": {"train": 1, "x": 1}}, "mixture_weights.x"),
        ({"informs": [JSON], "mixture_weights": {"train": 0}}, "mixture_weights.train"),
        ({"informs": [JSON, JSON], "mixture_weights": {"train": 1}}, "informs.1.name"),
        (
            {"informs": [JSON, {**JSON, "name": "b"}], "mixture_weights": {"b": 1}},
            "mixture_weights",
        ),
        (
            {
                "informs": [JSON],
                "pack_tokens": True,
                "pack_seq_length": 8,
                "tokenization": {"max_length": 9},
            },
            "tokenization.max_length",
        ),
        (
            {"informs": [JSON], "pack_tokens": True, "tokenization": {"padding": "longest"}},
            "tokenization.padding",
        ),
        (
            {"informs": [JSON], "tokenization": {"max_length": 3, "truncation": False}},
            "tokenization.max_length",
        ),
        ({"informs": [JSON], "save": {"path": "x", "compression": "g"}}, "save.compression"),
    ],
)
def test_errors_across_keys_name_the_key_to_correct(options, place):
    assert places(lambda: Mixture(**options)) == [place]
