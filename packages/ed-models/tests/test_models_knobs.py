"""Every execution field has an effect on a Llama: on its program, sharding, files or numbers.

Most are seen in the jaxpr: the program is traced, not compiled. `proves` names the field;
docs/config_reference.md is made from it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_infra.sharding.axes import CONSTRAINED_AXES, PartitionAxis
from ed_infra.sharding.placement import constrain
from ed_infra.testing import tiny_llama
from ed_layers.context import name_activation
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.base.caches import get_cache_sharding
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

ONE = (1, 1, 1, 1, 1)
B, S = 4, 24
IDS = np.random.default_rng(0).integers(3, 256, (B, S)).astype(np.int32)
BLOCKS = {"attn_mechanism": "blockwise", "blocksize_q": 8, "blocksize_k": 8}
SPLIT = {"sharding_axis_dims": (1, 2, 1, 2, 2)}
proves = pytest.mark.proves


def config(**changes: Any) -> LlamaConfig:
    fields = tiny_llama(num_hidden_layers=2, initializer_range=0.08)
    del fields["model_type"]
    return LlamaConfig(**{**fields, "sharding_axis_dims": ONE, **changes})


def abstract(changes: dict[str, Any]) -> tuple[Any, Any]:
    made = config(**changes)
    return nnx.split(nnx.eval_shape(lambda: LlamaForCausalLM(made, rngs=nnx.Rngs(0))))


def train_program(**changes: Any) -> str:
    """jaxpr of the gradient of the loss, with a key."""
    graphdef, state = abstract(changes)

    def loss(state: Any, key: jax.Array) -> Any:
        return nnx.merge(graphdef, state).compute_loss(IDS, key=key)[0].loss

    return str(jax.make_jaxpr(jax.grad(loss))(state, jax.random.key(0)))


def cached_program(**changes: Any) -> str:
    """jaxpr of a prompt and one more token, by a dense cache."""
    graphdef, state = abstract(changes)

    def steps(state: Any) -> Any:
        model = nnx.merge(graphdef, state)
        out = model(IDS, past_key_values=model.init_cache(B, 32))
        return model(IDS[:, :1], past_key_values=out.past_key_values).logits

    return str(jax.make_jaxpr(steps)(state))


before = functools.cache(lambda program, key: program(**dict(key)))

REMAT = {
    "gradient_checkpointing": "save_only_these_names",
    "gradient_checkpointing_targets": ("attn_output",),
}


@pytest.mark.daily("kvdtype")
@pytest.mark.parametrize(
    ("program", "base", "changes"),
    [
        pytest.param(program, base, changes, marks=mark, id=", ".join(mark.args))
        for mark, program, base, changes in [
            (proves("attn_mechanism"), train_program, {}, {"attn_mechanism": "blockwise"}),
            (
                proves("decode_attn_mechanism"),
                cached_program,
                {},
                {"decode_attn_mechanism": "blockwise"},
            ),
            (proves("blocksize_q"), train_program, BLOCKS, {"blocksize_q": 16}),
            (proves("blocksize_k"), train_program, BLOCKS, {"blocksize_k": 16}),
            (
                proves("operation_configs", "BaseOperationConfig"),
                train_program,
                BLOCKS,
                {"operation_configs": {"blockwise": {"block_q": 4}}},
            ),
            (proves("attn_dtype"), train_program, {}, {"attn_dtype": jnp.bfloat16}),
            (proves("attn_softmax_dtype"), train_program, {}, {"attn_softmax_dtype": "bf16"}),
            (proves("kvdtype"), cached_program, {}, {"kvdtype": jnp.bfloat16}),
            (proves("scan_attention_layers"), train_program, {}, {"scan_attention_layers": False}),
            (
                proves("use_scan_mlp"),
                train_program,
                {"scan_mlp_chunk_size": 8},
                {"use_scan_mlp": True},
            ),
            (
                proves("scan_mlp_chunk_size"),
                train_program,
                {"use_scan_mlp": True, "scan_mlp_chunk_size": 8},
                {"scan_mlp_chunk_size": 4},
            ),
            (
                proves("gradient_checkpointing"),
                train_program,
                {},
                {"gradient_checkpointing": "nothing_saveable"},
            ),
            (
                proves("gradient_checkpointing_targets"),
                train_program,
                REMAT,
                {"gradient_checkpointing_targets": ("mlp_down",)},
            ),
            (proves("easy_method"), train_program, REMAT, {"easy_method": "serve"}),
            (proves("fcm_max_ratio"), train_program, {}, {"fcm_max_ratio": 0.5}),
            (
                proves("fcm_min_ratio"),
                train_program,
                {"fcm_max_ratio": 0.5},
                {"fcm_min_ratio": 0.25},
            ),
            (
                proves("use_sharding_constraint"),
                train_program,
                SPLIT,
                {"use_sharding_constraint": True},
            ),
            (proves("backend", "get_backend"), train_program, SPLIT, {"backend": "tpu"}),
        ]
    ],
)
def test_option_changes_the_compiled_program(program: Any, base: dict, changes: dict):
    plain = before(program, tuple(base.items()))
    if changes.get("backend"):
        with pytest.raises(ConfigError, match="backend 'tpu' is not available here"):
            program(**{**base, **changes})
        assert config(**changes).get_backend() == "tpu" != config().get_backend()
        return
    changed = program(**{**base, **changes})
    assert changed != plain
    assert program(**base) == plain, "tracing twice produces the same text"


POLICIES = [
    *("everything_saveable", "nothing_saveable", "checkpoint_dots"),
    *("checkpoint_dots_with_no_batch_dims", "mlp_notsaveable", "attn_notsaveable"),
    *("mlp_attn_notsaveable", "offload_dot_with_no_batch_dims"),
]
BY_NAME = [
    *("save_only_these_names", "save_anything_except_these_names", "save_any_names_but_these"),
    *("save_from_both_policies", "save_and_offload_only_these_names"),
]


@pytest.mark.nightly
@proves("EasyDeLGradientCheckPointers", "AVAILABLE_GRADIENT_CHECKPOINT_TARGETS")
def test_remat_policies_are_different_programs():
    texts = [train_program(gradient_checkpointing=name) for name in ["", *POLICIES]]
    targets = {"gradient_checkpointing_targets": ("mlp_up", "attn_output")}
    texts += [train_program(gradient_checkpointing=name, **targets) for name in BY_NAME]
    # The inputs of the backward pass differ.
    assert len(set(texts)) == len(texts)


@pytest.mark.nightly
def test_easy_method_turns_noise_and_recomputation_off():
    for method in ("serve", "convert"):
        quiet = train_program(easy_method=method, fcm_max_ratio=0.5, attention_dropout=0.5, **REMAT)
        assert "random_bits" not in quiet
        assert "remat" not in quiet and "checkpoint" not in quiet
    assert "random_bits" in train_program(attention_dropout=0.5)


@pytest.mark.nightly
@proves("get_partition_rules(fully_sharded)")
def test_the_rules_of_a_configuration_are_those_of_its_model():
    made = config(**SPLIT)
    rules = dict(made.get_partition_rules())
    assert rules == dict(LlamaForCausalLM.create(made)._get_partition_rules())
    name = next(pattern for pattern in rules if "q_proj" in pattern)
    assert tuple(rules[name]) == ("fsdp", "tp")
    assert tuple(dict(made.get_partition_rules(fully_sharded=False))[name]) == (None, "tp")
    assert not made.replace().is_sealed, "asking seals nothing"


@proves("get_partition_rules", "sharding_axis_dims", "sharding_axis_names", "partition_axis")
def test_sharding_options_place_parameters():
    from ed_infra.sharding.placement import specs

    def kernel_spec(**changes: Any) -> tuple:
        made = config(**changes)
        model = nnx.eval_shape(lambda: LlamaForCausalLM(made, rngs=nnx.Rngs(0)))
        spec = specs(model, made)
        return tuple(spec["model"]["layers"]["run_0_2_1"][0]["self_attn"]["q_proj"]["kernel"])

    split = kernel_spec(sharding_axis_dims=(1, 4, 1, 2, 1))
    assert split == (None, "fsdp", "tp")
    assert kernel_spec(sharding_axis_dims=(1, 8, 1, 1, 1)) == (None, "fsdp")
    names = ("data", "fsdp", "ep", "tp", "sp")
    dims = (2, 4, 1, 1, 1)
    moved = kernel_spec(
        sharding_axis_dims=dims,
        sharding_axis_names=names,
        partition_axis=PartitionAxis(fully_sharded_data_parallel_axis="data"),
    )
    assert moved == (None, "data")

    class RuledConfig(LlamaConfig):
        def get_partition_rules(self, fully_sharded: bool = True):
            return (("q_proj/kernel", ("tp", "fsdp")), (".*", ()))

    fields = {**config(sharding_axis_dims=(1, 4, 1, 2, 1)).to_dict()}
    ruled = RuledConfig.from_dict(fields)
    model = nnx.eval_shape(lambda: LlamaForCausalLM(ruled, rngs=nnx.Rngs(0)))
    flat = dict(nnx.to_flat_state(specs(model, ruled)))
    found = {path[-2:]: tuple(spec) for path, spec in flat.items()}
    assert found["q_proj", "kernel"] == (None, "tp", "fsdp")
    assert found["k_proj", "kernel"] == ()


#: Field of `PartitionAxis` -> where its effect is seen. `refused`: a warning says what to set.
AXES = {
    **dict.fromkeys(
        (
            *("batch_axis", "sequence_axis", "query_sequence_axis", "head_axis", "kv_head_axis"),
            *("key_sequence_axis", "mlp_intermediate_axis", "vocab_axis", "attention_dim_axis"),
            "attention_kv_dim_axis",
        ),
        "training",
    ),
    **dict.fromkeys(
        (
            *("decode_batch_axis", "decode_head_axis", "decode_kv_head_axis"),
            *("decode_query_sequence_axis", "decode_attention_dim_axis"),
            "decode_attention_kv_dim_axis",
        ),
        "decoding",
    ),
    "decode_key_sequence_axis": "cache",
    **dict.fromkeys(
        ("fully_sharded_data_parallel_axis", "expert_axis", "expert_gate_axis"), "parameters"
    ),
    **dict.fromkeys(
        (
            *("data_parallel_axis", "tensor_parallel_axis", "sequence_parallel_axis"),
            *("expert_parallel_axis", "hidden_state_axis", "bias_head_sequence_axis"),
            "bias_key_sequence_axis",
        ),
        "refused",
    ),
}


def named_arrays(made: LlamaConfig, mode: Any) -> str:
    """jaxpr of the named arrays of a layer, and of a flat batch of tokens."""

    def arrays(x: jax.Array, flat: jax.Array) -> Any:
        names = ("attn_query", "attn_key", "mlp_up", "layer_output")
        four = [name_activation(y, name, made, mode) for name in names[:2] for y in (x, flat)]
        three = [name_activation(x[..., 0], name, made, mode) for name in names[2:]]
        logits = constrain(x[..., 0], ("batch", "sequence", "vocab"), made, mode)
        return [*four, *three, logits]

    return str(jax.make_jaxpr(arrays)(jnp.zeros((4, 8, 8, 16)), jnp.zeros((1, 8, 8, 16))))


def axes_effect(kind: str, made: LlamaConfig) -> object:
    if kind in ("training", "decoding"):
        return named_arrays(made, "train" if kind == "training" else "decode")
    if kind == "cache":
        return get_cache_sharding(made, ("batch", "kv_heads", "key_sequence", None), (4, 2, 8, 8))
    kernels = (("embed", "heads"), ("embed", "expert_gate"), ("expert", "embed"))
    return [made.partition_manager.param(names, (8, 8), made.mesh) for names in kernels]


@pytest.mark.parametrize("field", dataclasses.fields(PartitionAxis), ids=lambda field: field.name)
def test_every_partition_axis_has_an_effect_or_is_refused(
    field: Any, caplog: pytest.LogCaptureFixture
):
    forget_said()
    base: dict[str, Any] = {
        "sharding_axis_dims": (1, 2, 2, 2, 1),
        "use_sharding_constraint": True,
        "use_sharded_kv_caching": True,
        "fsdp_is_ep_bound": False,
    }
    other = "ep" if field.default != "ep" else "tp"
    with caplog.at_level("WARNING", logger="easydel"):
        changed = config(**base, partition_axis=PartitionAxis(**{field.name: other}))
    kind = AXES[field.name]
    if kind == "refused":
        assert f"partition_axis.{field.name} = {other!r} has no effect: " in caplog.text
        assert re.search(r"set \w+_axis|omit it", caplog.text)
        return
    assert not caplog.text
    assert axes_effect(kind, changed) != axes_effect(kind, config(**base))
    if field.name in CONSTRAINED_AXES:  # without the constraint, the compiler chooses
        with caplog.at_level("WARNING", logger="easydel"):
            config(
                **{**base, "use_sharding_constraint": False}, partition_axis=changed.partition_axis
            )
        assert f"{field.name} = {other!r} has no effect" in caplog.text
        assert "use_sharding_constraint: true" in caplog.text


def test_partition_axis_of_a_model_without_sharding_constraints_is_refused_when_sealed(
    caplog: pytest.LogCaptureFixture,
):
    forget_said()
    made = config(sharding_axis_dims=(1, 2, 2, 2, 1))
    made.partition_axis = PartitionAxis(attention_dim_axis="ep")
    with caplog.at_level("WARNING", logger="easydel"):
        made.seal()
    assert "attention_dim_axis = 'ep' has no effect" in caplog.text


@pytest.mark.nightly
@pytest.mark.parametrize("name", [n for n, kind in AXES.items() if kind == "training"])
def test_axes_of_activations_change_the_program_and_not_the_loss(name: str):
    base = {"sharding_axis_dims": (1, 2, 2, 2, 1), "use_sharding_constraint": True}
    moved = {**base, "partition_axis": PartitionAxis(**{name: "ep"})}
    assert train_program(**moved) != before(train_program, tuple(base.items()))
    losses = [
        float(LlamaForCausalLM.create(config(**c), seed=1).compute_loss(IDS)[0].loss)
        for c in (base, moved)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.nightly
@proves("use_sharded_kv_caching", "kv_cache_sharding_sequence_axis_name", "sequence_axis_name")
def test_cache_sharding_options_place_the_cache():
    def cache_spec(**changes: Any) -> Any:
        model = LlamaForCausalLM.create(config(**{**SPLIT, **changes}))
        return tuple(model.init_cache(B, 32).keys.sharding.spec)

    assert cache_spec() == (None, "fsdp", "tp")
    sharded = {"use_sharded_kv_caching": True}
    assert cache_spec(**sharded) == (None, "fsdp", "tp", "sp")
    both = {**sharded, "sharding_axis_dims": (2, 1, 1, 2, 2)}
    axes = ("sp", "ep")
    assert cache_spec(**both, kv_cache_sharding_sequence_axis_name=axes) == (None, "dp", "tp", "sp")
    assert cache_spec(**sharded, kv_cache_sharding_sequence_axis_name="ep") == (None, "fsdp", "tp")
    manager = config(**SPLIT, sequence_axis_name="ep").partition_manager
    assert tuple(manager.resolve(["batch", "sequence"])) == (("fsdp", "dp"), "ep")
    with pytest.raises(ConfigError, match="kv_cache_sharding_sequence_axis_name: the mesh has no"):
        config(kv_cache_sharding_sequence_axis_name="seq")


@pytest.mark.nightly
def test_performance_options_do_not_change_loss_or_gradients():
    """Scanned MLP, constraints inside layers, remat and a mesh with sp: loss and gradients."""

    def loss_and_grads(**changes: Any) -> tuple[float, dict]:
        model = LlamaForCausalLM.create(config(**changes), seed=1)
        graphdef, params, other = model.split_module()

        def loss(params: Any) -> Any:
            return model.merge_module(graphdef, params, other).compute_loss(IDS)[0].loss

        value, grads = jax.jit(jax.value_and_grad(loss))(params)
        flat = nnx.to_flat_state(grads)
        return float(value), {path: np.asarray(v.get_value()) for path, v in flat}

    value, grads = loss_and_grads()
    scanned = {"use_scan_mlp": True, "scan_mlp_chunk_size": 7}  # 24 is no multiple
    everything = {
        **SPLIT,
        "use_scan_mlp": True,
        "scan_mlp_chunk_size": 8,
        "use_sharding_constraint": True,
        "gradient_checkpointing": "save_from_both_policies",
        "gradient_checkpointing_targets": ("attn_output",),
    }
    for changes in (scanned, everything):
        other, other_grads = loss_and_grads(**changes)
        assert other == pytest.approx(value, rel=1e-6)
        for path, grad in grads.items():
            assert np.abs(other_grads[path] - grad).max() <= 1e-5 * np.abs(grad).max(), path


@pytest.mark.nightly
def test_sharded_cache_and_other_mechanism_generate_same_tokens():
    plain = LlamaForCausalLM.create(config(), seed=1).generate(IDS, max_new_tokens=4).sequences
    other = config(
        sharding_axis_dims=(1, 2, 1, 2, 2),
        use_sharded_kv_caching=True,
        decode_attn_mechanism="blockwise",
    )
    model = LlamaForCausalLM.create(other, seed=1)
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=4).sequences, plain)


@pytest.mark.nightly
def test_forgetful_masks_forget_only_in_training():
    model = LlamaForCausalLM.create(config(fcm_max_ratio=0.5, fcm_min_ratio=0.5), seed=1)
    forward = jax.jit(lambda key: model(IDS, key=key).logits)
    plain = jax.jit(lambda: model(IDS).logits)()
    a, b = forward(jax.random.key(0)), forward(jax.random.key(1))
    np.testing.assert_array_equal(a, forward(jax.random.key(0)))
    # The first token sees itself in any case; the last differs between keys.
    np.testing.assert_allclose(a[:, 0], plain[:, 0], atol=1e-5)
    assert np.abs(a[:, -1] - plain[:, -1]).max() > 1e-3
    assert np.abs(a[:, -1] - b[:, -1]).max() > 1e-3


@pytest.mark.nightly
@proves("_get_partition_rules", "model.config", "graphdef", "graphstate")
def test_a_model_shows_its_parts():
    model = LlamaForCausalLM.create(config(**SPLIT))
    rules = dict(model._get_partition_rules())
    name = next(pattern for pattern in rules if "q_proj" in pattern)
    assert tuple(rules[name]) == ("fsdp", "tp")
    assert model._get_partition_rules((("x", ()),)) == (("x", ()),)
    with pytest.raises(ConfigError, match="replace"):
        model.config.attn_mechanism = "ring"
    doubled = jax.tree.map(lambda leaf: 2 * leaf, model.graphstate)
    other = model.merge_module(model.graphdef, doubled, model.graphother)
    assert not np.allclose(other(IDS).logits, model(IDS).logits)


@pytest.mark.nightly
@proves("AutoEasyDeLModelForCausalLM.from_pretrained(dtype)", "push_to_hub")
def test_model_files_load_in_dtype_and_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = LlamaForCausalLM.create(config())
    model.save_pretrained(tmp_path)
    for dtype in (jnp.float32, jnp.bfloat16):
        loaded = AutoEasyDeLModelForCausalLM.from_pretrained(
            str(tmp_path), dtype=dtype, sharding_axis_dims=ONE
        )
        assert loaded(IDS[:1, :2]).last_hidden_state.dtype == dtype

    class Hub:
        def __init__(self, token: str) -> None:
            self.token = token

        def create_repo(self, repo_id: str, **how: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, repo_id: str, folder_path: Path, **how: Any) -> str:
            names = {file.name for file in folder_path.iterdir()}
            assert {"config.json", "model.safetensors"} <= names
            return f"{self.token} wrote {repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert model.push_to_hub("me/tiny", token="secret") == "secret wrote me/tiny"
