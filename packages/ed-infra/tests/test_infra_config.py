"""Configurations: fields of both parents, nothing swallowed, sealed, hashable, copied."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import ClassVar

import jax.numpy as jnp
import pytest
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.fields import FIELDS, WITHOUT_EFFECT
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_infra.testing import LLAMA3_ROPE, tiny_llama


class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    model_type = "llama"


class T5Config(EasyDeLBaseConfig, transformers.T5Config):
    model_type = "t5"


class GPT2Config(EasyDeLBaseConfig, transformers.GPT2Config):
    model_type = "gpt2"


class MyModelConfig(EasyDeLBaseConfig):
    """As the base configuration guide writes one."""

    model_type = "my_model"

    def __init__(self, hidden_size: int = 768, vocab_size: int = 32000, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size


class AnnotatedConfig(EasyDeLBaseConfig):
    model_type = "annotated"
    hidden_size: int = 96
    custom_param: int = 42


def llama(**changes) -> LlamaConfig:
    fields = tiny_llama(**changes)
    fields.pop("model_type")
    return LlamaConfig(**fields)


def test_config_accepts_fields_of_both_parent_classes():
    config = llama(attn_mechanism="flash", attn_dtype=jnp.bfloat16, num_key_value_heads=None)
    assert config.attn_mechanism == "flash_attn2"
    assert config.attn_dtype == "bfloat16"
    assert config.num_key_value_heads == config.num_attention_heads  # derived by Hugging Face
    assert config.hidden_act == "silu"
    assert LlamaConfig().hidden_size == transformers.LlamaConfig().hidden_size
    for name, field in FIELDS.items():
        assert getattr(LlamaConfig(), name) == field.default, name


def test_hugging_face_config_defaults_are_preserved():
    assert T5Config().is_encoder_decoder is True
    assert T5Config().d_model == 512
    assert GPT2Config().hidden_size == GPT2Config().n_embd == 768
    assert not hasattr(GPT2Config(), "rope_parameters")
    assert GPT2Config(hidden_size=64).n_embd == 64


@pytest.mark.parametrize("cls", [LlamaConfig, MyModelConfig, AnnotatedConfig, EasyDeLBaseConfig])
def test_an_unknown_keyword_is_an_error(cls: type):
    with pytest.raises(ConfigError, match="'atn_mechanism'; did you mean 'attn_mechanism'"):
        cls(atn_mechanism="ring")


def test_invalid_config_arguments_raise_config_error():
    with pytest.raises(ConfigError, match="'hiden_size'; did you mean 'hidden_size'"):
        llama(hiden_size=3)
    with pytest.raises(ConfigError, match=r"temperature.*GenerationConfig"):
        llama(temperature=0.5)
    with pytest.raises(ConfigError, match=r"hidden_size.*expected int"):
        llama(hidden_size="wide")
    with pytest.raises(ConfigError, match="not a multiple of the number of attention heads"):
        llama(hidden_size=65)
    with pytest.raises(ConfigError, match="2 sizes for 5 axes"):
        llama(sharding_axis_dims=(1, 2))
    with pytest.raises(ConfigError, match="another name of 'attn_mechanism'"):
        llama(attn_mechanism="ring", attention_mechanism="flash")
    with pytest.raises(ConfigError, match="between 0 and 1"):
        llama(fcm_max_ratio=1.5)


def test_field_without_effect_warns_once(caplog):
    forget_said()
    assert set(FIELDS) > set(WITHOUT_EFFECT)
    with caplog.at_level(logging.WARNING, logger="easydel"):
        llama()
        assert not caplog.records
        llama(hardware_abstraction=True)
        llama(hardware_abstraction=True)
        llama(operation_configs={"blockwise": {"block_q": 8}, "eager": {"block_q": 8}})
    record, operation = caplog.records
    assert record.getMessage().startswith("hardware_abstraction = True has no effect: ")
    assert "set native_kernels: false" in record.getMessage()
    assert operation.getMessage().startswith("operation_configs['vanilla'] has no effect")


def test_field_aliases_read_and_write_the_same_field():
    config = EasyDeLBaseConfig(
        hidden_size=768,
        num_attention_heads=12,
        attention_mechanism="flash",
        gradient_checkpointing_policy="",
        use_hardware_abstraction=True,
        scan_attention_layers=False,
    )
    assert (config.attn_mechanism, config.hardware_abstraction) == ("flash_attn2", True)
    assert config.scan_layers is config.scan_attention_layers is False
    config.attention_mechanism = "ring"
    assert config.attn_mechanism == "ring"


def test_a_class_with_its_own_init():
    config = MyModelConfig(
        hidden_size=4096,
        sharding_axis_dims=(1, -1, 1, 1, 1),
        sharding_dcn_axis_dims=None,
        attn_mechanism="flash",
        gradient_checkpointing="nothing_saveable",
        moe_method="einsum",
        fsdp_is_ep_bound=False,
        hardware_abstraction=True,
        rope_theta=5e5,
        max_position_embeddings=4096,
    )
    assert (config.hidden_size, config.vocab_size) == (4096, 32000)
    assert config.rope_theta == 5e5
    assert AnnotatedConfig(custom_param=1).hidden_size == 96
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    config = MyModelConfig(rope_scaling=scaling)
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.max_position_embeddings == 4 * 4096
    assert scaling == {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


def test_rope_theta_lives_in_rope_parameters():
    config = llama(rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope_theta == config.rope_parameters["rope_theta"] == 7.0
    config.rope_theta = 8.0
    assert config.rope_parameters["rope_theta"] == 8.0
    assert config.replace(rope_theta=9.0).rope_theta == 9.0
    replaced = config.replace(rope_scaling={"type": "linear", "factor": 4.0})
    assert replaced.rope_parameters["factor"] == 4.0
    assert replaced.rope_theta == 8.0


def test_a_configuration_prints_as_json():
    assert repr(llama()).startswith("LlamaConfig {")


def test_dtype_fields_follow_the_model_unless_set():
    config = llama()
    assert config.compute_dtype("kvdtype", jnp.bfloat16) == jnp.bfloat16
    assert config.compute_dtype("attn_softmax_dtype", jnp.bfloat16) == jnp.float32
    config = llama(attn_dtype="fp32")
    assert config.compute_dtype("kvdtype", jnp.bfloat16) == jnp.float32
    with pytest.raises(ConfigError, match="unknown dtype"):
        config.kvdtype = "flot32"


def test_bits_are_short_for_a_quantization():
    assert llama(bits=4).quantization_config == EasyDeLQuantizationConfig("nf4")
    with pytest.raises(ConfigError, match="bits = 5"):
        llama(bits=5)


def test_custom_arguments_are_saved_and_validated():
    config = llama()
    config.attach_custom_arguments(mine={"a": [1]})
    assert config.to_dict()["mine"] == {"a": [1]}
    with pytest.raises(ConfigError, match="'hidden_size' is a field"):
        config.attach_custom_arguments(hidden_size=3)
    with pytest.raises(ConfigError, match="JSON"):
        config.attach_custom_arguments(bad=object())


def test_a_sealed_configuration_does_not_change():
    config = llama(rope_parameters=dict(LLAMA3_ROPE)).seal()
    assert config.seal() is config
    with pytest.raises(ConfigError, match=r"config\.replace\(hidden_size=3\)"):
        config.hidden_size = 3
    with pytest.raises(ConfigError, match="replace"):
        config.attention_mechanism = "ring"
    with pytest.raises(ConfigError, match="replace"):
        config.rope_parameters["factor"] = 2.0
    with pytest.raises(ConfigError, match="replace"):
        config.rope_parameters.update(factor=2.0)
    config.hidden_size = config.hidden_size  # what transformers does when it standardizes
    config.validate()
    changed = config.replace(attn_mechanism="ring")
    assert not changed.is_sealed
    changed.rope_parameters["factor"] = 2.0
    assert config.rope_parameters["factor"] == 8.0


def test_replace_is_checked_and_keeps_the_rest():
    config = llama(attn_mechanism="ring", quantization_config={"dtype": "int8"})
    config.attach_custom_arguments(mine=1)
    changed = config.replace(num_hidden_layers=2, axis_dims=(1, 1, 1, -1, 1))
    assert (changed.num_hidden_layers, changed.sharding_axis_dims) == (2, (1, 1, 1, -1, 1))
    assert (changed.attn_mechanism, changed.mine) == ("ring", 1)
    assert changed.quantization_config == EasyDeLQuantizationConfig("int8")
    assert config.num_hidden_layers == 4
    with pytest.raises(ConfigError, match="no field 'num_layer'"):
        config.replace(num_layer=2)
    with pytest.raises(ConfigError, match="unknown attention mechanism"):
        config.replace(attn_mechanism="wrong")


def test_equality_and_hash_follow_the_values():
    assert llama() == llama()
    assert hash(llama()) == hash(llama()) == hash(llama().seal())
    assert llama() != llama(attn_mechanism="ring")
    assert len({llama(), llama(), llama(vocab_size=8)}) == 2
    assert llama() != transformers.LlamaConfig()
    a, b = llama(), llama()
    b.set_model_mesh(EasyDeLBaseConfig.create_mesh(axis_dims=(1, 1, 1, 2, 1)))
    assert a != b


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))]
)
def test_copies_are_equal_and_as_sealed(duplicate):
    config = llama(sharding_axis_dims=(1, 2, 1, 1, 1), rope_parameters=dict(LLAMA3_ROPE))
    _ = config.mesh
    for original in (config, config.replace().seal()):
        other = duplicate(original)
        assert other == original
        assert hash(other) == hash(original)
        assert other.is_sealed == original.is_sealed
        assert other.rope_parameters is not original.rope_parameters
        assert other.mesh == original.mesh


def test_the_mesh_is_made_once_and_kept():
    config = llama(sharding_axis_dims=(1, 2, 1, 2, 1))
    assert config.mesh is config.mesh
    assert config.jax_mesh().shape["tp"] == 2
    assert config.replace(vocab_size=512).mesh is config.mesh
    assert config.replace(sharding_axis_dims=(1, 1, 1, 1, 1)).mesh.size == 1
    own = config.create_mesh(axis_dims=(1, 4, 1, 1, 1), axis_names=("dp", "fsdp", "ep", "tp", "sp"))
    config.set_model_mesh(own)
    config.seal()
    config.set_model_mesh(own)
    with pytest.raises(ConfigError, match="mesh cannot be changed"):
        config.set_model_mesh(config.create_mesh((1, 1, 1, 1, 1)))
    with pytest.raises(ConfigError, match="keep one"):
        config.create_mesh((1, 1, 1, 1, 1), axis_dims=(1, 1, 1, 1, 1))


def test_expert_meshes_fold_fsdp_and_sp():
    config = llama(sharding_axis_dims=(1, 2, 2, 1, 2))
    assert dict(config.expert_mesh.shape) == {"dp": 1, "ep": 8, "tp": 1}
    config = config.replace(fsdp_is_ep_bound=False)
    assert dict(config.auto_expert_mesh.shape) == {"dp": 2, "ep": 4, "tp": 1}
    assert config.expert_abstract_mesh.shape["dp"] == 2


def test_to_dict_holds_only_json_values():
    config = llama(
        attn_dtype=jnp.bfloat16,
        quantization_config=EasyDeLQuantizationConfig("int8"),
        operation_configs={"flash_attn2": {"block_q": 64}},
        sharding_rules=[("a", ("fsdp", None))],
    )
    data = json.loads(json.dumps(config.to_dict()))
    assert LlamaConfig.from_dict(data) == config


def test_annotated_config_is_validated_with_all_its_fields():
    class LimitedConfig(EasyDeLBaseConfig):
        model_type = "limited"
        size: int = 4

        def validate(self):
            super().validate()
            if self.size > 8:
                raise ConfigError(f"size={self.size} is more than 8")

    assert LimitedConfig(size=8).size == 8
    with pytest.raises(ConfigError, match="size=9"):
        LimitedConfig(size=9)


def test_annotated_config_maps_names_of_architecture_fields(tmp_path):
    class MappedConfig(EasyDeLBaseConfig):
        model_type = "mapped"
        attribute_map: ClassVar = {"hidden_size": "model_dim"}
        model_dim: int = 32

    config = MappedConfig(hidden_size=48)
    assert config.hidden_size == config.model_dim == 48
    config.save_pretrained(tmp_path)
    assert "hidden_size" not in json.loads((tmp_path / "config.json").read_text())
    assert MappedConfig.from_pretrained(tmp_path).hidden_size == 48
