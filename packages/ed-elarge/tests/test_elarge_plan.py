"""`elarge plan`: shapes, optimizer states, verdicts, and the files that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.plan import child, devices, report, serving, settings, shapes, training
from ed_elarge.plan.mesh import build_mesh
from ed_infra.errors import ConfigError

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 512,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "gemma2": {"head_dim": 16},
    "mamba2": {
        **dict.fromkeys(SMALL.keys() - {"hidden_size", "num_hidden_layers", "vocab_size"}),
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
    },
    "recurrent_gemma": {"attention_window_size": 16, "max_position_embeddings": None},
    "qwen3_next": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


ASK_CHILD = child.ask_child


@pytest.fixture(autouse=True)
def read_model_classes_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the shapes of model classes without a child process, which would import jax again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def answer(run: Any, question: str, *, sections: dict[str, Any], **details: Any) -> Any:
        from ed_elarge.plan.answers import SHAPE_ANSWERS

        return SHAPE_ANSWERS[question](run_of({**run.to_dict(), **sections}), details)

    monkeypatch.setattr("ed_elarge.plan.child.ask_child", answer)


def run_file(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return the sections of a run that trains a small model."""
    fields = {**SMALL, **OF_FAMILY.get(model_type, {})}
    fields = {name: value for name, value in fields.items() if value is not None}
    base: dict[str, Any] = {
        "model": {"config": {"model_type": model_type, **fields}, "tokenizer": "tokenizer"},
        "sharding": {"axis_dims": [1, 4, 1, 2, 1]},
        "mixture": {
            "informs": [{"type": "json", "data_files": "rows.jsonl"}],
            "pack_tokens": True,
            "pack_seq_length": 64,
        },
        "trainer": {"trainer_type": "sft", "total_batch_size": 8, "max_training_steps": 2},
        "actions": ["train"],
    }
    for name, section in changes.items():
        base[name] = {**base.get(name, {}), **section} if isinstance(section, dict) else section
    return base


def run_of(values: dict[str, Any]) -> Any:
    return normalize(Document("plan.yaml", value=values))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw mu": {"tx_mu_dtype": "bfloat16"},
    "adamw_8bit": {},
    "lion": {},
    "lion_8bit": {},
    "adafactor": {"optimizer_kwargs": {"min_dim_size_to_factor": 32}},
    "muon": {},
    "muon_8bit": {},
    "dion": {"optimizer_kwargs": {"rank_fraction": 0.25}},
    "soap": {"optimizer_kwargs": {"max_precond_dim": 100, "precondition_1d": True}},
    "adopt": {},
    "ademamix": {},
    "quad": {"optimizer_kwargs": {"block_size": 24, "max_size_dense": 100}},
    "skew": {"optimizer_kwargs": {"dtype": "bfloat16"}},
    "mars": {},
    "rmsprop": {"optimizer_kwargs": {"momentum": 0.9}},
    "sgd": {},
    "schedule_free_adamw": {},
    "adamw ema": {"ema_decay": 0.9},
    "adamw lora": {"lora": {"rank": 4, "dora": True}},
    "adamw pissa": {
        "lora": {"rank": 4, "targets": ["q_proj", "embed"], "init_lora_weights": "pissa"}
    },
    "adamw loftq": {
        "lora": {"rank": 4, "init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 8}}
    },
    "adamw lora of some layers": {"lora": {"rank": 4, "targets": ["q_proj", "embed_tokens"]}},
}


@pytest.mark.daily("float32-adamw", "bfloat16-adamw_8bit", "bfloat16-muon")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_arguments_of_a_train_step_have_the_predicted_bytes(name: str, param_dtype: str):
    import jax
    from ed_elarge.plan.abstract import abstract_model
    from ed_trainers.optimizers import build_optimizer, build_schedule
    from ed_trainers.state import EasyDeLState, split_model

    options = {"optimizer": name.partition(" ")[0], **OPTIMIZERS[name]}
    lora = options.pop("lora", None)
    values = run_file("qwen3_moe", loader={"param_dtype": param_dtype})
    values["trainer"] |= options
    run = run_of(values if lora is None else {**values, "lora": lora})
    graphdef, params, other = split_model(abstract_model(run, None), ())
    state = EasyDeLState(None, params, other, None, graphdef)  # type: ignore[arg-type]
    tx = build_optimizer(run.trainer, build_schedule(run.trainer, 10))
    leaves = jax.tree.leaves(state.abstract(tx))
    exact = sum(
        leaf.dtype.itemsize
        * int(jax.numpy.prod(jax.numpy.array(leaf.sharding.shard_shape(leaf.shape))))
        for leaf in leaves
    )
    step = training.step(settings.training(run), shapes.get_shapes(run), build_mesh(run, 8))
    predicted = step.arguments - step.parts["batch"]
    assert predicted == pytest.approx(exact, rel=0.002)


@pytest.mark.nightly
def test_family_is_planned_by_its_model_class(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ed_elarge.plan.child.ask_child", ASK_CHILD)
    found = shapes.get_shapes(run_of(run_file("stablelm")))
    d, f, v, heads = 64, 96, 512, 8
    layer = 2 * d * d + 2 * d * (d // heads * 4) + 3 * d * f + 4 * d
    assert found.parameters == 4 * layer + 2 * v * d + 2 * d
    monkeypatch.setattr(
        "ed_elarge.plan.child.ask_child", None
    )  # the second answer is the stored one
    assert shapes.get_shapes(run_of(run_file("stablelm"))) == found


def test_plan_command_writes_files_without_jax(tmp_path: Path):
    values = run_file(sharding={"axis_dims": [1, -1, 1, 1, 1]})
    shapes.get_shapes(run_of(values))  # stores the shapes for the command
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    code = (
        "import sys\n"
        "from ed_elarge.command.main import app\n"
        "try:\n"
        f"    app(['plan', {str(file)!r}, '--topology', 'v5e:2x4', '-o', {str(tmp_path)!r}])\n"
        "finally:\n"
        "    print(sorted({'jax', 'flax', 'transformers', 'torch', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["fits"]
    assert values["training"]["memory"]["total"] == sum(
        values["training"]["memory"]["parts"].values()
    )
    assert len(values["meshes"]) >= 4
    page = (tmp_path / "plan.html").read_text()
    assert "http" not in page.replace(values["hardware"]["source"], "")
    assert "does not fit" not in done.stdout


def test_run_that_does_not_fit_has_a_change_that_makes_it_fit():
    from ed_elarge.plan.changes import list_changes
    from ed_elarge.plan.estimate import plan_run
    from ed_elarge.plan.meshes import rank_meshes

    values = run_file(
        sharding={"axis_dims": [1, -1, 1, 1, 1]},
        model={
            "config": {
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "vocab_size": 32000,
                "max_position_embeddings": 16384,
            },
            "tokenizer": "tokenizer",
        },
        loader={"dtype": "bfloat16"},
        mixture={**run_file()["mixture"], "pack_seq_length": 16384},
    )
    made = plan_run(run_of(values), devices.parse_hardware("v5e:2x4", None))
    assert not made.fits
    assert made.training is not None
    best = list_changes(made, made.training, rank_meshes(made))[0]
    assert best.fits
    key, _, value = best.text.split()[0].partition("=")
    changed = json.loads(json.dumps(values))
    *path, last = key.split(".")
    section = changed
    for name in path:
        section = section.setdefault(name, {})
    section[last] = yaml.safe_load(value)
    assert plan_run(run_of(changed), made.hardware).training.memory.total == best.total  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("times", "close"), [(0.9, False), (0.97, True), (1.03, True), (1.1, False)]
)
def test_plan_near_the_limit_says_that_a_compiler_decides(times: float, close: bool):
    from ed_elarge.plan.estimate import plan_run

    run, hardware = run_of(run_file()), devices.parse_hardware("v5e:2x4", None)
    made = plan_run(run, hardware)
    share = made.training.memory.total * times / hardware.device.usable  # type: ignore[union-attr]
    device = replace(hardware.device, memory_gib=hardware.device.memory_gib * share)
    values = report.to_dict(plan_run(run, replace(hardware, device=device)))
    assert values["fits"] == (times > 1)
    assert (report.CLOSE_TEXT in "\n".join(report.lines(values))) == close


def test_plan_of_pairs_has_two_sequences_of_a_row_and_a_reference():
    pairs = {"trainer": {"trainer_type": "dpo"}}
    own = settings.training(run_of(run_file(**pairs)))
    assert (own.microbatch, own.sequences) == (8, 16)

    def parts(**changes: Any) -> dict[str, int]:
        run = run_of(run_file(**changes))
        return training.step(
            settings.training(run), shapes.get_shapes(run), build_mesh(run, 8)
        ).parts

    with_copy, without = parts(**pairs), parts(**pairs, lora={"rank": 4})
    assert with_copy["reference"] == with_copy["parameters"]
    assert without["reference"] == 0  # the base under the adapters is the reference
    free = {"trainer": {"trainer_type": "dpo", "reference_free": True}}
    assert parts(**free)["reference"] == 0
    assert with_copy["activations"] == 2 * parts()["activations"]


def test_plan_of_grpo_has_a_reference_and_the_pages_of_its_engine():
    from ed_elarge.plan.estimate import plan_run

    grpo = {
        "trainer_type": "grpo",
        "reward_functions": ["exact"],
        "max_prompt_length": 64,
        "max_completion_length": 64,
    }

    def run(**changes: Any) -> Any:
        values = run_file(trainer={**grpo, **changes})
        values["mixture"] = {"informs": values["mixture"]["informs"]}
        return run_of(values)

    made = plan_run(run(), devices.parse_hardware("v5e:2x4", None)).training
    assert made is not None
    own, parts = made.settings, made.memory.parts
    assert own.length == 128
    assert own.token_arrays[5:] == ("old_logps", "reference_logps", "correction")
    assert parts["reference"] == parts["parameters"]
    assert own.engine is not None
    # 4 layers, keys and values of 2 of 4 heads, which have 8 numbers of 4 bytes.
    token = 4 * 2 * 2 * 8 * 4
    # The engine has pages for the 8 completions of a generation, not for max_num_seqs 256.
    assert parts["KV pages"] == 8 * 128 * token
    without = settings.training(run(beta=0, importance_sampling_correction="none"))
    assert (without.token_arrays[5:], without.has_reference, without.forwards) == ((), False, 0)


@pytest.mark.parametrize(
    ("topology", "named", "words"),
    [
        (None, None, "name the hardware once"),
        ("v5e:4x4", "8xH100", "name the hardware once"),
        ("v5e:4", None, ""),
        ("v5e", None, "is no topology"),
        ("v5e:2x2x2", None, "has 3 dimensions"),
        ("h100:8", None, "has no torus"),
        (None, "8xH900", "H900"),
        (None, "0xH100", "is invalid"),
        (None, "v5p-7", "counts cores, 2 for each chip"),
        ("v6e-12", None, "the number of chips is one of 1, 4, 8"),
    ],
)
def test_invalid_hardware_is_an_error(topology: str | None, named: str | None, words: str):
    if not words:
        assert devices.parse_hardware(topology, named).count == 4
        return
    with pytest.raises(ConfigError, match=words):
        devices.parse_hardware(topology, named)


@pytest.mark.parametrize("targets", [None, ["self_attn", "experts"]])
def test_slots_of_adapters_have_the_predicted_bytes(targets: list[str] | None):
    import jax
    from ed_elarge.plan.abstract import abstract_model
    from ed_elarge.plan.serving import count_slot_bytes
    from ed_layers.lora.slots import SlotParam
    from ed_models.adapters.slots import with_slots
    from flax import nnx

    values = run_file("qwen3_moe", actions=["serve"], sharding={"axis_dims": [1, 1, 1, 1, 1]})
    del values["trainer"], values["mixture"]
    esurge = {"max_loras": 3, "max_lora_rank": 4, "max_model_len": 256}
    run = run_of(
        {**values, "esurge": esurge if targets is None else {**esurge, "lora_targets": targets}}
    )
    model = abstract_model(run, None, serves=True)
    slots = nnx.eval_shape(lambda: with_slots(model, 3, 4, targets))
    exact = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(slots, SlotParam))
    )
    mesh = build_mesh(run, 1)
    assert count_slot_bytes(settings.serving(run), shapes.get_shapes(run), mesh) == exact


def test_serving_pages_hold_the_concurrent_requests():
    from ed_elarge.plan.estimate import plan_run

    values = run_file(actions=["serve"], sharding={"axis_dims": [1, 1, 1, -1, 1]})
    del values["trainer"], values["mixture"]
    made = plan_run(
        run_of({**values, "esurge": {"max_model_len": 256, "page_size": 16}}),
        devices.parse_hardware("v5e:2x2", None),
    )
    engine = made.serving.engine  # type: ignore[union-attr]
    assert engine.longest == 256
    assert engine.needed == {"full": 16}
    # Four layers, one of four heads on each device, keys and values of eight numbers in float32.
    assert engine.page_bytes == {"full": 4 * 16 * 1 * 2 * 8 * 4}
    assert engine.concurrent == 256
    assert made.fits


@pytest.mark.nightly
@pytest.mark.parametrize("kv_cache", [None, "int8"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_pools_have_the_pages_of_the_engine(
    model_type: str, kv_cache: str | None, monkeypatch: pytest.MonkeyPatch
):
    from dataclasses import replace

    from ed_elarge.building.parts import new_config
    from ed_elarge.plan import serving
    from ed_esurge.engine import setup
    from ed_infra import registry

    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "page_size": 16}
    values = run_file(model_type, actions=["serve"], sharding={"axis_dims": [1, 1, 1, 2, 1]})
    values["model"]["config"] |= {"sliding_window": 32} if model_type == "gemma2" else {}
    del values["trainer"], values["mixture"]
    values |= {"esurge": options}
    if kv_cache is not None:
        values |= {"quantization": {"kv_cache": {"quantization_method": kv_cache}}}
    run = run_of(values)
    small = replace(devices.find_device("v5e"), memory_gib=0.004)
    mesh = build_mesh(run, 2)
    ours = serving.plan_engine(settings.serving(run), shapes.get_shapes(run), mesh, small)
    parts = ours.memory.parts
    model = registry.get_module(run.task, model_type).create(new_config(run))
    made = setup.Setup.resolve(model, run.esurge)
    used = setup.device_bytes([leaf for _, leaf in _arrays(model)])
    assert parts["parameters"] == used
    monkeypatch.setattr(setup, "accelerator_memory", lambda model: [(small.usable, used)])
    work = parts["temporary buffers"] + parts["sampler state"]
    monkeypatch.setattr(setup.Setup, "_workspace", lambda self, pages: work)
    assert ours.pages == made.pool_sizes()
    for name, size in ours.page_bytes.items():
        assert size == setup.page_bytes(model, 16, name)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "recurrent_gemma"])
def test_states_have_the_bytes_that_the_engine_allocates(
    model_type: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """Slots and saved states, without and with drafts, within 5 %; here they are equal."""
    from ed_elarge.building.parts import new_config
    from ed_elarge.plan import serving
    from ed_esurge.engine import setup
    from ed_esurge.runner.memory import get_recurrent_caches
    from ed_infra import registry

    values = run_file(model_type, actions=["serve"], sharding={"axis_dims": [1, 1, 1, 1, 1]})
    del values["trainer"], values["mixture"]
    values["loader"] = {"dtype": dtype, "param_dtype": dtype}
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 16}
    small = replace(devices.find_device("v5e"), memory_gib=0.003)
    for more in ({}, {"num_states": 5}, {"num_pages": 40}, {"speculative_config": {}}):
        run = run_of({**values, "esurge": {**options, **more}})
        plan = serving.plan_engine(
            settings.serving(run), shapes.get_shapes(run), build_mesh(run, 1), small
        )
        parts = plan.memory.parts
        model_class = registry.get_module(run.task, model_type)
        model = model_class.create(new_config(run), dtype=dtype, param_dtype=dtype)
        made = setup.Setup.resolve(model, run.esurge)
        running = parts["recurrent states"] - plan.saved_states * plan.state_bytes
        work = parts["temporary buffers"] + parts["sampler state"] + running
        monkeypatch.setattr(
            setup,
            "accelerator_memory",
            lambda model, used=parts["parameters"]: [(small.usable, used)],
        )
        monkeypatch.setattr(setup.Setup, "_workspace", lambda self, pages, work=work: work)
        sizes = made.pool_sizes()
        assert sizes == {**plan.pages, setup.STATES_POOL: plan.saved_states}
        runner = made.runner(sizes=sizes)
        allocated = setup.device_bytes([*get_recurrent_caches(runner.memory.cache).values()])
        assert parts["recurrent states"] == pytest.approx(allocated, rel=0.05)
        assert plan.saved_states > 0


def _arrays(model: Any) -> list[tuple[Any, Any]]:
    from flax import nnx

    return [(path, v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("v5litepod-16", "v5e-16", "tpu-v5litepod-16", "16xv5e"), "v5e:4x4"),
        (("v5litepod-1",), "v5e:1x1"),
        (("v6e-8", "tpu-v6e-8"), "v6e:2x4"),
        (("v5p-8", "v5-8"), "v5p:2x2x1"),
        (("v4-32",), "v4:2x2x4"),
        (("v5p-128",), "v5p:4x4x4"),
        (("v5p-6144",), "v5p:12x16x16"),
        (("4090", "RTX 4090", "geforce-rtx-4090", "1xrtx4090"), "1xrtx4090"),
        (("2x3090", "2 x RTX3090"), "2xrtx3090"),
        (("5090",), "1xrtx5090"),
        (("a6000", "RTX A6000", "NVIDIA RTX A6000"), "1xa6000"),
        (("RTX 6000 Ada", "rtx6000-ada"), "1xrtx6000-ada"),
        (("A10",), "1xa10"),
        (("4xL40S",), "4xl40s"),
        (("Tesla T4", "t4"), "1xt4"),
    ],
)
def test_hardware_has_the_names_of_its_vendors(names: tuple[str, ...], text: str):
    assert {devices.parse_hardware(None, name).text for name in names} == {text}
    if ":" in text and "-" in names[0]:
        assert devices.parse_hardware(names[0], None).text == text


FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {},
    "nf4 of groups of 16": {"group_size": 16},
    "nf4 double": {"double_quantization": True},
    "int8": {},
    "int4": {},
    "fp8": {},
    "mxfp8": {},
    "mxfp4": {},
    "w8a8": {},
    "w4a8": {},
    "int8 of all matrices": {"pattern": ".*"},
    "int4 of all matrices": {"pattern": ".*"},
}


def store_model(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Write config.json of the model of a run, and return the run with the stored model."""
    (folder / "config.json").write_text(json.dumps(values["model"]["config"]))
    return {**values, "model": {"name_or_path": str(folder), "tokenizer": "tokenizer"}}


@pytest.mark.daily("nf4 double", "int8 of all matrices")
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_have_the_predicted_bytes(name: str, tmp_path: Path):
    import jax
    from ed_elarge.plan.abstract import abstract_model
    from ed_infra.sharding import placement
    from ed_layers.quantization.model import quantize
    from flax import nnx

    section = {"quantization_method": name.partition(" ")[0], **FORMATS[name]}
    values = store_model(tmp_path, run_file("qwen3_moe"))
    run = run_of({**values, "quantization": {"model": section}})
    base = abstract_model(run, None, is_base=True)
    model: Any = nnx.eval_shape(
        lambda state: quantize(
            nnx.merge(nnx.graphdef(base), state),
            {key.replace("quantization_method", "dtype"): one for key, one in section.items()},
        ),
        nnx.state(base),
    )
    state = nnx.state(model)
    places = jax.tree.leaves(placement.shardings(state, base.config))
    leaves = jax.tree.leaves(state)
    exact = sum(
        leaf.dtype.itemsize * int(jax.numpy.prod(jax.numpy.array(place.shard_shape(leaf.shape))))
        for leaf, place in zip(leaves, places, strict=True)
    )
    found, mesh = shapes.get_shapes(run), build_mesh(run, 8)
    planned = settings.training(run)
    step = training.step(planned, found, mesh)
    assert step.parts["parameters"] == pytest.approx(exact, rel=0.002)
    # Adapters alone have an optimizer.
    assert step.parts["masters"] == 0
    assert 0 < step.parts["moments"] <= 2 * step.parts["adapters"]


def count_device_bytes(model: Any) -> int:
    """Return the bytes of a model on the first device."""
    import jax
    from flax import nnx

    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState)))
        for shard in leaf.addressable_shards
        if shard.device == jax.devices()[0]
    )


@pytest.mark.parametrize("form", ["q4_0", "q8_0"])
def test_codes_of_a_gguf_file_have_the_predicted_bytes(form: str, tmp_path: Path):
    from ed_models import AutoEasyDeLConfig, AutoEasyDeLModelForCausalLM

    fields = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"}
    config = AutoEasyDeLConfig.for_model(
        "llama", **fields, num_hidden_layers=2, sharding_axis_dims=(1, 1, 1, 1, 1)
    )
    file = tmp_path / "model.gguf"
    AutoEasyDeLModelForCausalLM.from_config(config).save_gguf(file, dtype=form)
    values = run_file(quantization={"model": {"quantization_method": "gguf"}})
    run = run_of({**values, "model": {"name_or_path": str(file), "tokenizer": "tokenizer"}})
    model = AutoEasyDeLModelForCausalLM.from_pretrained(
        file,
        quantization_config={"dtype": "gguf"},
        apply_quantization=True,
        sharding_axis_dims=run.sharding.axis_dims,
    )
    found, mesh = shapes.get_shapes(run), build_mesh(run, 8)
    planned = training.step(settings.training(run), found, mesh)
    assert planned.parts["parameters"] == count_device_bytes(model)
    assert planned.parts["masters"] == 0
    sections = ("model", "quantization", "sharding")
    served = run_of({name: run.to_dict()[name] for name in sections} | {"actions": ["serve"]})
    engine = serving.plan_engine(
        settings.serving(served), found, mesh, devices.parse_hardware("v5e:2x4", None).device
    )
    assert engine.memory.parts["parameters"] == count_device_bytes(model)


def test_kept_codes_of_no_gguf_file_are_an_error(tmp_path: Path):
    values = store_model(tmp_path, run_file())
    run = run_of({**values, "quantization": {"model": {"quantization_method": "gguf"}}})
    with pytest.raises(ConfigError, match="keeps the codes of a GGUF file"):
        shapes.get_shapes(run)


@pytest.mark.parametrize("length", [1024, 16384])
def test_two_changes_are_searched_if_one_is_not_enough(length: int):
    from ed_elarge.plan.changes import list_changes
    from ed_elarge.plan.estimate import plan_run
    from ed_elarge.plan.meshes import rank_meshes

    values = run_file(sharding={"axis_dims": [1, 1, 1, -1, 1]}, loader={"dtype": "bfloat16"})
    values["model"]["config"] |= {"num_hidden_layers": 16, "max_position_embeddings": length}
    values["mixture"] |= {"pack_seq_length": length}
    made = plan_run(run_of(values), devices.parse_hardware("v5e-4", None))
    assert made.training is not None
    singles = list_changes(made, made.training, rank_meshes(made))
    least = min(one.total for one in singles)
    device = replace(made.hardware.device, memory_gib=(least - 1) / devices.GIB)
    short = plan_run(run_of(values), replace(made.hardware, device=device))
    assert short.training is not None and not short.fits
    changes = list_changes(short, short.training, rank_meshes(short))
    assert changes[0].fits
    assert changes[0].total <= device.usable
    assert changes[0].text.count("=") > 1
    text = "\n".join(report.lines(report.to_dict(short)))
    assert changes[0].text in text


def test_served_model_that_does_not_fit_has_changes(tmp_path: Path):
    from ed_elarge.plan.changes import list_changes
    from ed_elarge.plan.estimate import plan_run
    from ed_elarge.plan.meshes import rank_meshes

    values = run_file(actions=["serve"], sharding={"axis_dims": [1, 1, 1, -1, 1]})
    del values["trainer"], values["mixture"]
    values["model"]["config"] |= {"hidden_size": 4096, "intermediate_size": 14336}
    values["model"]["config"] |= {"num_hidden_layers": 32, "num_attention_heads": 32}
    values["model"]["config"] |= {"num_key_value_heads": 8, "vocab_size": 128256}
    made = plan_run(run_of(values), devices.parse_hardware(None, "4090"))
    assert made.serving is not None and not made.fits
    changes = list_changes(made, made.serving, rank_meshes(made))
    assert changes[0].fits and "quantization.model.quantization_method=" in changes[0].text
    values = store_model(tmp_path, values)
    quantized = {**values, "quantization": {"model": {"quantization_method": "nf4"}}}
    assert plan_run(run_of(quantized), made.hardware).fits
