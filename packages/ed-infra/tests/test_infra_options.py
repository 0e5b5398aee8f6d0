"""Options, fields, dtypes, errors: unknown names are rejected with a suggestion."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from ed_infra import errors, options, specs
from ed_infra.config import fields
from ed_infra.dtypes import canonical_dtype
from ed_infra.enums import TaskType, canonical_task
from ed_infra.options import Options, choice, dtype_name, explain_error
from ed_infra.sharding.axes import PartitionAxis


class Inner(Options):
    ALIASES: ClassVar = {"lr": "learning_rate"}
    learning_rate: float = 1e-3
    optimizer: Annotated[str, choice("optimizer", ["adamw", "lion"], {"adam": "adamw"})] = "adamw"
    dtype: Annotated[str, dtype_name] = "float32"


class Outer(Options):
    trainer: Inner = Inner()


def test_unknown_key_error_contains_path_and_nearest_name():
    with pytest.raises(pydantic.ValidationError) as caught:
        Outer(trainer={"learning_ratee": 1})
    (problem,) = caught.value.errors()
    assert problem["loc"] == ("trainer", "learning_ratee")
    assert explain_error(caught.value) == (
        "trainer.learning_ratee: unknown key 'learning_ratee'; did you mean 'learning_rate'?"
    )


def test_every_unknown_key_is_reported_at_once_and_braces_are_literal():
    with pytest.raises(pydantic.ValidationError) as caught:
        Inner(**{"{a}": 1, "lrr": 2})
    assert [p["loc"] for p in caught.value.errors()] == [("{a}",), ("lrr",)]
    assert "unknown key '{a}'" in explain_error(caught.value)


def test_alias_is_accepted_only_without_its_field():
    assert Inner(lr=2).learning_rate == 2
    with pytest.raises(pydantic.ValidationError, match="'lr' and 'learning_rate' are two names"):
        Inner(lr=2, learning_rate=2)


def test_names_out_of_a_list():
    assert Inner(optimizer="adam").optimizer == "adamw"
    with pytest.raises(pydantic.ValidationError, match="unknown optimizer 'adamv'; did you mean"):
        Inner(optimizer="adamv")
    assert Inner(dtype="bf16").dtype == "bfloat16"
    with pytest.raises(pydantic.ValidationError, match="did you mean 'bf16'"):
        Inner(dtype="bf61")


class Numbers(Options):
    count: int = 1
    rate: float = 0.5
    either: bool | float = False
    maybe: int | None = None
    many: tuple[int, ...] = ()
    named: dict[str, float] = pydantic.Field(default_factory=dict)
    type: Literal["a"] = "a"
    at_all: Annotated[float, pydantic.Field(allow_inf_nan=True)] = 0.0
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("count", True, "count"),
        ("rate", False, "rate"),
        ("maybe", True, "maybe"),
        ("many", [1, True], "many.1"),
        ("named", {"a": True}, "named.a"),
        ("inner", {"learning_rate": True}, "inner.learning_rate"),
    ],
)
def test_true_and_false_are_no_numbers(key: str, value: object, where: str):
    with pytest.raises(pydantic.ValidationError) as caught:
        Numbers(**{key: value})
    assert explain_error(caught.value) == f"{where}: Input should be a number, not true or false"
    assert Numbers(either=True).either is True
    assert Numbers(count="3", rate="1e-3", maybe=4.0) == Numbers(count=3, rate=0.001, maybe=4)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), ".inf", "nan"])
def test_number_options_reject_non_finite_values(value: object):
    for key, given in (("rate", value), ("named", {"a": value}), ("either", value)):
        with pytest.raises(pydantic.ValidationError):
            Numbers(**{key: given})
    assert Numbers(at_all=float("inf")).at_all == float("inf")


@pytest.mark.parametrize(
    ("kind", "allowed", "refused"),
    [
        (options.Seed, [0, 2**32 - 1], [-1, 2**32, 0.5, True]),
        (options.Count, [1, 2**31 - 1], [0, 2**31, True]),
        (options.Whole, [0, 5], [-1, 2**31]),
        (options.Positive, [1e-9, 10], [0, -1, float("inf"), 1e13, True]),
        (options.NotNegative, [0, 0.5], [-0.1, float("nan"), False]),
        (options.Fraction, [0, 1, 0.5], [-0.1, 1.1]),
        (options.Dropout, [0, 0.999], [1, -0.1]),
    ],
)
def test_bounded_number_options_reject_out_of_range_values(kind: Any, allowed: list, refused: list):
    class Bounded(Options):
        value: kind

    for value in allowed:
        assert Bounded(value=value).value == value
    for value in refused:
        with pytest.raises(pydantic.ValidationError):
            Bounded(value=value)


@pytest.mark.parametrize("key", ["LEARNING_RATE", "Learning_Rate", "LR"])
def test_capitals_do_not_hide_the_nearest_name(key: str):
    with pytest.raises(pydantic.ValidationError, match=r"did you mean '(learning_rate|lr)'"):
        Inner(**{key: 1})
    assert errors.did_you_mean("SEED", ["seed", "steps"]) == "; did you mean 'seed'?"
    assert errors.did_you_mean("trainn", ["TRAIN"]) == "; did you mean 'TRAIN'?"


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [("", "", 0), ("", "ab", 2), ("stf", "sft", 1), ("kitten", "sitting", 3), ("ab", "ba", 1)],
)
def test_edits_are_replaced_inserted_removed_and_swapped_characters(a: str, b: str, count: int):
    assert errors.edits(a, b) == errors.edits(b, a) == count


def test_only_near_names_are_suggested():
    known = ["use_ema", "learning_rate", "save_steps", "num_decay_steps", "pack_tokens", "logits"]
    for name in ("use_wandb", "packing_strategy", "max_steps", "lm"):
        assert errors.did_you_mean(name, known) == ""
    for name, near in [("decay_steps", "num_decay_steps"), ("laerning_raet", "learning_rate")]:
        assert errors.did_you_mean(name, known) == f"; did you mean {near!r}?"


def test_a_dtype_of_weights_is_a_float():
    with pytest.raises(pydantic.ValidationError, match="'int8' is not a floating-point dtype"):
        Inner(dtype="int8")


def test_options_do_not_change_but_are_replaced_and_checked_again():
    inner = Inner(lr=2)
    with pytest.raises(pydantic.ValidationError):
        inner.learning_rate = 3  # type: ignore[misc]
    assert inner.replace(lr=3, dtype="fp16") == Inner(learning_rate=3, dtype="float16")
    with pytest.raises(pydantic.ValidationError, match="unknown key 'l_rate'"):
        inner.replace(l_rate=3)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("bf16", "bfloat16"),
        ("fp32", "float32"),
        ("torch.float16", "float16"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.dtype("float32"), "float32"),
        (np.float64, "float64"),
        (np.dtype("int8"), "int8"),
    ],
)
def test_dtype_spellings_resolve_to_one_name(given: object, name: str):
    assert canonical_dtype(given) == name


@pytest.mark.parametrize("given", ["float33", object(), 3, None])
def test_unknown_dtypes_raise_config_error(given: object):
    with pytest.raises(errors.ConfigError, match="unknown dtype"):
        canonical_dtype(given)


def test_the_defaults_of_the_table_are_canonical():
    for field in fields.FIELDS.values():
        assert fields.normalize_fields(field.name, field.default) == field.default, field.name
        assert field.doc, field.name
        json.dumps(specs.to_json(field.default))
    assert set(fields.FIELD_ALIASES.values()) <= set(fields.FIELDS)


OPERATIONS = {"flash_attn2": specs.BaseOperationConfig(block_q=128, block_k=64)}


@pytest.mark.parametrize(
    ("field", "given", "canonical"),
    [
        ("attn_mechanism", "flash", "flash_attn2"),
        ("attn_mechanism", "splash", "blocksparse"),
        ("attn_mechanism", "standard", "vanilla"),
        ("moe_method", "einsum", "standard_moe"),
        ("backend", "", None),
        ("sharding_axis_dims", [1, -1, 1, 1, 1], (1, -1, 1, 1, 1)),
        ("attn_dtype", jnp.bfloat16, "bfloat16"),
        ("gradient_checkpointing_targets", ["mlp_up"], ("mlp_up",)),
        ("partition_axis", {"head_axis": ["tp", "sp"]}, PartitionAxis(head_axis=("tp", "sp"))),
        ("operation_configs", {"flash": {"blocksize_q": 128, "blocksize_k": 64}}, OPERATIONS),
        ("sequence_axis_name", "tp", "tp"),
        (
            "kv_cache_quantization_config",
            {"quantization_method": "8bit", "group_size": 128},
            specs.EasyDeLQuantizationConfig("int8", 128),
        ),
    ],
)
def test_values_take_their_canonical_form(field: str, given: object, canonical: object):
    assert fields.normalize_fields(field, given) == canonical


@pytest.mark.parametrize(
    ("field", "given", "says"),
    [
        ("attn_mechanism", "flsh", "did you mean 'flash'"),
        ("gradient_checkpointing", "nothing_savable", "did you mean 'nothing_saveable'"),
        ("gradient_checkpointing_targets", ["mlp_upp"], "gradient_checkpointing_targets"),
        ("backend", "quantum", "unknown backend"),
        ("sharding_axis_dims", [1, "x"], r"sharding_axis_dims\[1\]"),
        ("blocksize_q", "wide", "integer"),
        ("blocksize_q", 0, "greater than or equal to 1"),
        ("blocksize_q", True, "not true or false"),
        ("sharding_axis_dims", [1, True, 1, 1, 1], r"sharding_axis_dims\[1\].*not true or false"),
        ("sharding_axis_dims", [1, 0, 1, 1, 1], "sharding_axis_dims: .*at least 1, or -1"),
        ("sharding_axis_dims", [-1, -1, 1, 1, 1], "sharding_axis_dims: .*only one axis can be -1"),
        ("sharding_dcn_axis_dims", [1, -2, 1, 1, 1], "sharding_dcn_axis_dims: .*at least 1"),
        ("sharding_axis_names", ["dp", "tp", "dp"], "sharding_axis_names: .*occurs twice"),
        ("sharding_axis_names", ["dp", ""], "sharding_axis_names: .*is empty"),
        ("fcm_max_ratio", float("nan"), "finite"),
        ("fcm_max_ratio", 1.5, "less than or equal to 1"),
        ("bits", 3, "bits = 3: Input should be 4 or 8"),
        ("attn_dtype", "int8", "attn_dtype: 'int8' is not a floating-point dtype"),
        ("kvdtype", "int8", "kv_cache_quantization_config"),
        ("kv_cache_quantization_config", {"dtype": "int8", "group_size": True}, "group_size"),
        ("operation_configs", {"ring": {"blocksize_q": True}}, "block_q of an operation"),
        ("operation_configs", {"ring": {"blocksize_q": 1, "block_q": 1}}, "another name"),
        ("operation_configs", {"flash": {}, "flash_attn2": {}}, "another name of 'flash_attn2'"),
        ("kv_cache_quantization_config", {"dtyp": "nf4"}, "did you mean 'dtype'"),
        ("kv_cache_quantization_config", {"dtype": "4bit"}, "8-bit formats: int8, fp8"),
        ("quantization_config", {"dtype": "nf5"}, "did you mean 'nf4'"),
        ("partition_axis", {"heads_axis": "tp"}, "did you mean 'head_axis'"),
        ("partition_axis", {"head_axis": 3}, "head_axis = 3"),
        ("partition_axis", {"head_axis": ["tp", 3]}, "head_axis = "),
        ("sharding_rules", [3], "pairs of a regular expression"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(field: str, given: object, says: str):
    with pytest.raises(errors.ConfigError, match=says):
        fields.normalize_fields(field, given)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"sharding_axis_dims": (1, 2)}, "sharding_axis_dims"),
        ({"sharding_dcn_axis_dims": (1, 2)}, "sharding_dcn_axis_dims"),
        ({"fcm_min_ratio": 0.5, "fcm_max_ratio": 0.1}, "fcm_min_ratio"),
        ({"sequence_axis_name": "seq"}, "sequence_axis_name"),
        (
            {"kv_cache_sharding_sequence_axis_name": ("sp", "x")},
            "kv_cache_sharding_sequence_axis_name",
        ),
        ({"partition_axis": PartitionAxis(head_axis="model")}, "partition_axis"),
        (
            {"sharding_axis_names": ("data", "model"), "sharding_axis_dims": (2, 4)},
            "sharding_axis_names",
        ),
    ],
)
def test_fields_that_contradict_each_other_say_which_to_change(values: dict, field: str):
    fields.check_together({})
    with pytest.raises(errors.ConfigError) as caught:
        fields.check_together(values)
    assert caught.value.field == field


def test_task_aliases_resolve_to_one_task():
    for spelling in ("causal_lm", "causal-lm", "lm", "causal-language-model", "CAUSAL_LM"):
        assert canonical_task(spelling) is TaskType.CAUSAL_LM
    with pytest.raises(errors.ConfigError, match="did you mean"):
        canonical_task("causal-lmm")


def test_specs_check_themselves_and_go_through_json():
    spec = specs.EasyDeLQuantizationConfig("a4q")
    assert (spec.dtype, spec.bits, spec.quantizes_activations) == ("w4a8", 4, True)
    assert specs.from_mapping(type(spec), json.loads(json.dumps(spec.to_dict()))) == spec
    assert specs.LoraSpec(rank=8, alpha=16).scale == 2.0
    with pytest.raises(errors.ConfigError, match="rank"):
        specs.LoraSpec(rank=0)
    with pytest.raises(errors.ConfigError, match="has a size"):
        specs.AttnMaskDetail("sliding")
    for spec_type in (PartitionAxis, specs.BaseOperationConfig, specs.EasyDeLQuantizationConfig):
        assert dataclasses.is_dataclass(spec_type)
        hash(spec_type())


def test_to_json_rejects_unserializable_values():
    assert specs.to_json({"a": (1, jnp.float32, np.int64(3), {2, 1})}) == {
        "a": [1, "float32", 3, [1, 2]]
    }
    with pytest.raises(errors.ConfigError, match="cannot be written to JSON"):
        specs.to_json({"a": object()})
