"""Values that a configuration used to accept and get wrong later; its mesh, renamed and pickled."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import transformers
from ed_infra.compilation.fingerprint import fingerprint
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError, MeshError
from ed_infra.logging import forget_said
from ed_infra.rope import frequencies as rope
from ed_infra.rope import parameters as rope_parameters
from ed_infra.sharding import placement
from ed_infra.sharding.axes import AXIS_NAMES, PartitionAxis
from ed_infra.specs import BaseOperationConfig
from ed_infra.testing import require_torch, tiny_llama
from flax import nnx
from jax.sharding import PartitionSpec as P


class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    model_type = "llama"


class GPT2Config(EasyDeLBaseConfig, transformers.GPT2Config):
    model_type = "gpt2"


class OwnConfig(EasyDeLBaseConfig):
    """As the guide writes one."""

    model_type = "own"

    def __init__(self, attention_dropout: float = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.attention_dropout = attention_dropout


def llama(**changes: Any) -> LlamaConfig:
    fields = tiny_llama(**changes)
    fields.pop("model_type")
    return LlamaConfig(**fields)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_dropout": 1.0}, "attention_dropout = 1.0 is not a probability"),
        ({"attention_dropout": -0.1}, "attention_dropout = -0.1 is not a probability"),
        ({"attention_dropout": float("nan")}, "attention_dropout = nan is not a probability"),
        ({"fcm_min_ratio": 0.5, "fcm_max_ratio": 0.1}, "fcm_min_ratio = 0.5 is above fcm_max"),
        ({"rope_theta": 0}, "rope_theta = 0 must be above 0"),
        ({"rope_theta": -1e4}, "rope_theta = -10000.0 must be above 0"),
        ({"rope_theta": float("nan")}, "rope_theta = nan must be a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0 must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor = True must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2' must be a number"),
        ({"rope_scaling": {"type": "linear", "factr": 2.0}}, "'factr'; did you mean 'factor'"),
        ({"rope_scaling": {"type": "linear"}}, "Missing required keys .*factor"),
        ({"rope_scaling": {"type": "lama3", "factor": 2.0}}, "'lama3'; did you mean 'llama3'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "unknown rope_type"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "must be at most 1"),
        ({"bits": 3}, "bits = 3: Input should be 4 or 8"),
        ({"blocksize_q": True}, "blocksize_q = True: .*not true or false"),
        ({"dtype": "flot32"}, "dtype: unknown dtype 'flot32'; did you mean 'float32'"),
    ],
)
def test_values_that_nothing_can_run_with(changes: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        llama(**changes)


def test_dropouts_of_every_kind_of_class():
    with pytest.raises(ConfigError, match=r"attn_pdrop = 1.5"):
        GPT2Config(attn_pdrop=1.5)
    with pytest.raises(ConfigError, match="attention_dropout = 2"):
        OwnConfig(attention_dropout=2)
    config = llama(attention_dropout=0.5)
    with pytest.raises(ConfigError, match="attention_dropout = 1 "):
        config.attention_dropout = 1
    assert config.replace(attention_dropout=0).attention_dropout == 0


@pytest.mark.parametrize("name", ["fp32", "float32", "f32", "torch.float32", "bf16", "fp16"])
def test_the_dtype_of_a_file_has_the_usual_abbreviations(name: str):
    expected = {"bf16": "bfloat16", "fp16": "float16"}.get(name, "float32")
    for config in (llama(dtype=name), llama(torch_dtype=name), EasyDeLBaseConfig(dtype=name)):
        assert config.dtype == expected


def test_a_configuration_has_the_same_fingerprint_with_and_without_torch(monkeypatch):
    require_torch()
    with_torch = llama(dtype="bfloat16")
    monkeypatch.setattr("transformers.configuration_utils.is_torch_available", lambda: False)
    without_torch = llama(dtype="bfloat16")
    names = [fingerprint(config, imported=time.time()) for config in (with_torch, without_torch)]
    assert names[0] == names[1]


def test_block_sizes_of_an_operation_as_the_guide_spells_them():
    config = llama(operation_configs={"flash_attn2": {"blocksize_q": 64, "blocksize_k": 32}})
    assert config.operation_configs == {"flash_attn2": BaseOperationConfig(block_q=64, block_k=32)}
    with pytest.raises(ConfigError, match="'blocksize_qq'; did you mean 'blocksize_q'"):
        llama(operation_configs={"flash_attn2": {"blocksize_qq": 64}})


# --- rope -----------------------------------------------------------------------------------------


def test_every_formula_has_its_parameters():
    assert rope_parameters.READS.keys() == rope.ROPE_TYPES.keys()
    known = set().union(*rope_parameters.READS.values())
    from transformers.modeling_rope_utils import RopeParameters

    common = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section"}
    # Models of Hunyuan read `alpha`, which the type of transformers lacks.
    assert known == {*RopeParameters.__annotations__, "alpha"} - common


def test_parameters_of_transformers_and_of_families_stay_allowed(caplog: Any):
    class Qwen(EasyDeLBaseConfig, transformers.Ministral3Config):
        model_type = "ministral3"

    sections = {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
    assert llama(rope_parameters=sections).rope_parameters["mrope_section"] == [1, 1, 2]
    own = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    assert Qwen(rope_parameters=own).rope_parameters["llama_4_scaling_beta"] == 0.1
    with pytest.raises(ConfigError, match="unknown name 'llama_4_scaling_beta'"):
        llama(rope_parameters=own)
    forget_said()
    with caplog.at_level(logging.WARNING, logger="easydel"):
        llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "beta_fast": 32})
    assert [r.getMessage() for r in caplog.records] == [
        "rope_parameters: 'beta_fast' has no effect with rope_type 'linear'"
    ]


def test_each_layer_type_is_checked():
    nested = {"full_attention": {"rope_theta": 0.0}, "sliding_attention": {"rope_theta": 2.0}}
    with pytest.raises(ConfigError, match=r"rope_theta = 0.0"):
        EasyDeLBaseConfig(rope_parameters=nested)
    with pytest.raises(ConfigError, match="rope_theta = 0"):
        rope.inv_frequencies({"rope_theta": 0}, 8)


def test_files_keep_rope_parameters_that_are_unknown(tmp_path: Path, caplog: Any):
    scaling = {"rope_type": "linear", "factor": 2.0, "finetuned": True}
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama(rope_scaling=scaling)))
    forget_said()
    with caplog.at_level(logging.WARNING, logger="easydel"):
        config = LlamaConfig.from_pretrained(tmp_path).seal()
        assert config.replace(vocab_size=8).seal().rope_parameters["finetuned"] is True
    said = [r.getMessage() for r in caplog.records if "finetuned" in r.getMessage()]
    assert said == ["rope_parameters: 'finetuned' has no effect with rope_type 'linear'"]
    for change in ({"rope_scaling": {"factr": 2}}, {"rope_parameters": {"factr": 2}}):
        with pytest.raises(ConfigError, match="unknown name 'factr'"):
            LlamaConfig.from_pretrained(tmp_path, **change)
        with pytest.raises(ConfigError, match="unknown name 'factr'"):
            config.replace(**change)
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama(rope_theta=0.0)))
    with pytest.raises(ConfigError, match=r"rope_theta = 0.0"):
        LlamaConfig.from_pretrained(tmp_path)


def test_in_place_config_changes_are_validated_at_model_creation():
    config = llama(rope_scaling={"rope_type": "linear", "factor": 2.0})
    config.rope_parameters["factor"] = 0.0
    with pytest.raises(ConfigError, match=r"factor = 0.0"):
        config.seal()
    config = llama()
    with pytest.raises(ConfigError, match="rope_theta = 0"):
        config.rope_theta = 0
    config.add_basic_configurations(fcm_min_ratio=0.5)
    with pytest.raises(ConfigError, match=r"fcm_min_ratio = 0.5"):
        config.seal()


# --- axes of the mesh -----------------------------------------------------------------------------


def placed(config: EasyDeLBaseConfig) -> P:
    """Spec of a kernel from embed to heads."""
    module = nnx.Module()
    module.kernel = nnx.Param(jnp.ones((8, 8)), axes=("embed", "heads"))
    return placement.specs(module, config)["kernel"]


def test_renamed_axes_keep_their_place():
    names = ("data", "shard", "expert", "model", "seq")
    config = llama(sharding_axis_names=names, sharding_axis_dims=(1, 2, 1, 4, 1))
    assert placed(config) == P("shard", "model")
    manager = config.partition_manager
    assert manager.resolve(["batch", "sequence"]) == P(("shard", "data"), "seq")
    assert manager.axis.decode_key_sequence_axis == "seq"
    assert dict(config.expert_mesh.shape) == {"dp": 1, "ep": 2, "tp": 4}
    config = llama(
        sharding_axis_names=("dp", "fsdp", "ep", "model", "sp"), axis_dims=(1, 2, 1, 4, 1)
    )
    assert placed(config) == P("fsdp", "model")
    assert placed(config.replace(sharding_axis_names=AXIS_NAMES)) == P("fsdp", "tp")
    own = PartitionAxis(head_axis="expert", fully_sharded_data_parallel_axis=("data", "shard"))
    names = ("data", "shard", "expert", "model", "seq")
    config = llama(sharding_axis_names=names, axis_dims=(2, 2, 2, 1, 1), partition_axis=own)
    assert placed(config) == P(("data", "shard"), "expert")


def test_fewer_axes_need_a_meaning():
    two = {"sharding_axis_names": ("data", "model"), "sharding_axis_dims": (2, 4)}
    with pytest.raises(ConfigError, match="no dimension is split over the mesh axis 'data'"):
        llama(**two)
    with pytest.raises(ConfigError, match="over the mesh axis 'data'"):
        llama(**two, partition_axis=PartitionAxis(head_axis="model"))
    meaning = PartitionAxis(head_axis="model", fully_sharded_data_parallel_axis="data")
    assert placed(llama(**two, partition_axis=meaning)) == P("data", "model")
    assert placed(llama(sharding_axis_names=("fsdp", "tp"), axis_dims=(2, 4))) == P("fsdp", "tp")
    idle = llama(sharding_axis_names=("fsdp", "stage"), sharding_axis_dims=(2, 1))
    assert placed(idle) == P("fsdp")
    with pytest.raises(ConfigError, match=r"names 'modle', .*did you mean 'model'"):
        llama(**two, partition_axis=PartitionAxis(head_axis="modle", batch_axis="data"))


def test_a_mesh_that_is_set_is_checked_too():
    config = llama()
    with pytest.raises(ConfigError, match="mesh axis 'data'"):
        config.set_model_mesh(config.create_mesh((2, 4), ("data", "model")))
    config.set_model_mesh(config.create_mesh((1, 2, 1, 4, 1), ("a", "b", "c", "d", "e")))
    assert placed(config) == P("b", "d")


# --- pickling -------------------------------------------------------------------------------------


def own_mesh(sealed: bool = False) -> LlamaConfig:
    config = llama(vocab_size=32)
    config.set_model_mesh(config.create_mesh((1, 2, 1, 3, 1)))
    return config.seal() if sealed else config


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))]
)
def test_a_mesh_of_its_own_goes_with_a_copy(duplicate: Any, sealed: bool):
    config = own_mesh(sealed)
    other = duplicate(config)
    assert other == config and hash(other) == hash(config)
    assert other.mesh == config.mesh and other.mesh.size == 6
    assert other != llama(vocab_size=32)
    assert other.replace(vocab_size=33).mesh == config.mesh
    assert other.is_sealed is sealed


CHILD = """
import pickle, sys
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import MeshError
import test_infra_config_checks
config = pickle.loads(sys.stdin.buffer.read())
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "unpickling starts nothing"
try:
    config.mesh
except MeshError as error:
    print(error)
own = config.create_mesh((1, 1, 1, 1, 1))
config.set_model_mesh(own)
assert config.mesh is own and config.is_sealed
assert config.from_dict(config.to_dict()).mesh.size == 2
"""


@pytest.mark.nightly
def test_missing_devices_error_states_the_mesh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(own_mesh(sealed=True)),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    said = done.stdout.decode()
    assert "dp=1, fsdp=2, ep=1, tp=3, sp=1" in said
    assert "4 of them are not in this process" in said and "set_model_mesh" in said
    with pytest.raises(MeshError, match="occurs twice"):
        llama().create_mesh((1, 1), ("a", "a"))


@pytest.mark.timeout(60)  # an allocation of these sizes would need longer
@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (LlamaConfig, {"rms_norm_eps": math.nan}, "rms_norm_eps = nan must be a finite number"),
        (LlamaConfig, {"rms_norm_eps": -math.inf}, "rms_norm_eps = -inf must be a finite number"),
        (
            GPT2Config,
            {"initializer_range": math.inf},
            "initializer_range = inf must be a finite number",
        ),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": math.nan}},
            r"rope_parameters\.factor = nan must be a finite number",
        ),
        (LlamaConfig, {"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000 .* at most 10000"),
        (GPT2Config, {"n_layer": 10**6}, "n_layer = 1000000 is invalid"),
        (GPT2Config, {"hidden_size": 10**9}, "hidden_size = 1000000000 is invalid"),
        (LlamaConfig, {"vocab_size": 2**40}, "at most 67108864 is allowed"),
    ],
)
def test_numbers_that_no_model_has_are_refused_at_once(cls, values, message) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**values)
    with pytest.raises(ConfigError, match=message):
        cls.from_dict(values)


def test_numbers_that_are_assigned_later_are_checked() -> None:
    config = LlamaConfig()
    with pytest.raises(ConfigError, match="rms_norm_eps = nan"):
        config.rms_norm_eps = math.nan
    with pytest.raises(ConfigError, match="num_hidden_layers = 100000 "):
        config.replace(num_hidden_layers=100_000)


def test_open_limit_of_time_steps_may_be_infinite() -> None:
    class Mamba2Config(EasyDeLBaseConfig, transformers.Mamba2Config):
        model_type = "mamba2"

    assert tuple(Mamba2Config(time_step_limit=(0.0, math.inf)).time_step_limit) == (0.0, math.inf)
    with pytest.raises(ConfigError, match=r"time_step_limit\[0\] = nan"):
        Mamba2Config(time_step_limit=(math.nan, 1.0))
