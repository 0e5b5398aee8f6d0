"""Values of config.json that EasyDeL writes."""

import pytest
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.files import accept_easydel_values
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said

MARK = {"model_type": "llama", "easy_method": "train"}


def accept(**fields):
    return accept_easydel_values({**MARK, **fields}, "config.json")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"fcm_min_ratio": -1, "fcm_max_ratio": -1}, {"fcm_min_ratio": 0, "fcm_max_ratio": 0}),
        ({"fcm_min_ratio": 0.1, "fcm_max_ratio": 0.5}, {}),
        ({"backend": "tpu", "platform": "pallas"}, {"backend": None, "platform": None}),
        ({"sharding_axis_dims": [1, 4096, 1, 1, 1]}, {"sharding_axis_dims": None}),
        ({"sharding_dcn_axis_dims": [1, 2, 1, 1, 1]}, {"sharding_dcn_axis_dims": None}),
        (
            {"sharding_axis_names": ["a", "b"], "partition_axis": {"head_axis": "a"}},
            {"sharding_axis_names": None, "partition_axis": None},
        ),
        ({"partition_axis": {"head_axis": "tp"}}, {}),
        *(
            ({"attn_mechanism": name, "decode_attn_mechanism": name}, dict.fromkeys(both, "auto"))
            for both in [("attn_mechanism", "decode_attn_mechanism")]
            for name in (
                "unified_attention",
                "paged_flash_attention",
                "multi_latent_ragged_page_attention_v1",
                "multi_latent_ragged_page_attention_v2",
                "a mechanism of the next release",
            )
        ),
        ({"attn_mechanism": "vanilla", "decode_attn_mechanism": None}, {}),
        ({"model_type": "cohere", "sliding_window_pattern": 4}, {"model_type": "cohere2"}),
        ({"model_type": "cohere", "layer_types": ["full_attention"]}, {"model_type": "cohere2"}),
        ({"model_type": "cohere", "layer_types": None}, {}),
        ({"image_token_index": 9, "image_token_id": 262144}, {"image_token_id": None}),
        ({"image_token_id": 9}, {}),
        (
            {"text_config": {"model_type": "cohere", "sliding_window_pattern": 4}},
            {"text_config": {"model_type": "cohere2", "sliding_window_pattern": 4}},
        ),
        (
            {"quantization_config": {"dtype": "int8", "bits": None, "jax_native": False}},
            {"quantization_config": {"dtype": "int8"}},
        ),
        (
            {"quantization_config": {"dtype": "affine", "bits": 8, "runtime_dtype": "mxfp8"}},
            {"quantization_config": {"dtype": "int8"}},
        ),
        (
            {"kv_cache_quantization_config": {"dtype": "int8", "bits": 8, "group_size": 64}},
            {"kv_cache_quantization_config": {"dtype": "int8", "group_size": 64}},
        ),
        ({"quantization_config": {"dtype": "affine", "bits": 3}}, {"quantization_config": None}),
        ({"quantization_config": {"dtype": "nvfp4"}}, {"quantization_config": None}),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {}),
        (
            {"operation_configs": {"flash_attn2": {"fwd_params": {"q_blocksize": 64}}}},
            {"operation_configs": {"flash_attn2": {"block_q": 64}}},
        ),
        (
            {"operation_configs": {"flash_attn2": {"platform": "auto", "bwd_params": None}}},
            {"operation_configs": {"flash_attn2": {}}},
        ),
        ({"operation_configs": {"unified_attention": {"seq_threshold_3d": 1}}}, {}),
        (
            {"text_config": {"model_type": "llama", "fcm_min_ratio": -1, "backend": "gpu"}},
            {"text_config": {"model_type": "llama", "fcm_min_ratio": 0}},
        ),
    ],
)
def test_values_of_easydel_become_values_here(stored, expected):
    result = accept(**stored)
    if "unified_attention" in (stored.get("operation_configs") or ()):
        expected = {"operation_configs": None}
    for name, value in {**stored, **expected}.items():
        assert result.get(name) == value
    EasyDeLBaseConfig.from_dict({n: v for n, v in result.items() if n != "text_config"})


def test_one_line_names_what_is_reset(caplog):
    forget_said()
    accept(backend="tpu", sharding_axis_dims=[1, 8, 1, 1, 1], attn_mechanism="unified_attention")
    (record,) = caplog.records
    assert "backend, sharding_axis_dims describe another machine and are reset" in record.message
    assert "unified_attention" in record.message
    caplog.clear()
    accept(backend=None, sharding_axis_dims=[1, -1, 1, 1, 1], fcm_min_ratio=-1)
    assert not caplog.records


def test_other_files_are_unchanged():
    for stored in (
        {"model_type": "llama", "fcm_max_ratio": 2, "backend": "tpu"},
        {"model_type": "llama", "easydel": {"backend": "tpu"}, "router_z_loss_coef": 0.1},
    ):
        assert accept_easydel_values(stored, "config.json") is stored


class ComputedConfig(EasyDeLBaseConfig, transformers.FalconConfig):
    model_type = "computed-size"


def test_computed_value_in_a_file_must_be_the_computed_one():
    fields = {"hidden_size": 64, "num_attention_heads": 4}
    assert ComputedConfig.from_dict({**fields, "head_dim": 16}).head_dim == 16
    assert ComputedConfig.from_dict({**fields, "head_dim": None}).head_dim == 16
    with pytest.raises(ConfigError, match="head_dim = 8 contradicts"):
        ComputedConfig.from_dict({**fields, "head_dim": 8})
