"""The registry, launching, logging, and what importing costs."""

from __future__ import annotations

import logging
import subprocess
import sys

import ed_infra
import pytest
from ed_infra import distributed, registry, testing
from ed_infra import logging as ed_logging
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, RegistryError


@pytest.fixture
def empty_registry(monkeypatch):
    monkeypatch.setattr(registry, "_configs", {})
    monkeypatch.setattr(registry, "_modules", {})
    monkeypatch.setattr(registry, "_entry_points", dict)


@pytest.mark.proves("register_config", "register_module")
def test_registry_returns_registered_classes(empty_registry):
    @registry.register_config("toy")
    class ToyConfig(EasyDeLBaseConfig):
        model_type = "toy"

    @registry.register_module(TaskType.CAUSAL_LM, config=ToyConfig, model_type="toy")
    class Toy:
        pass

    assert registry.get_config("toy") is ToyConfig
    assert registry.get_module("causal-lm", "toy") is Toy
    assert (Toy.model_type, Toy.model_task) == ("toy", TaskType.CAUSAL_LM)
    assert registry.list_tasks("toy") == [TaskType.CAUSAL_LM]
    with pytest.raises(RegistryError, match="has no embedding module"):
        registry.get_module("embedding", "toy")
    with pytest.raises(RegistryError, match="'toi'; did you mean 'toy'"):
        registry.get_config("toi")
    with pytest.raises(RegistryError, match="already"):
        registry.register_config("toy")(type("Other", (), {}))


class FakeEntryPoint:
    value = "toys.module"

    def __init__(self, load):
        self.load = load


def test_model_families_are_imported_lazily(empty_registry, monkeypatch):
    loads = []

    def load():
        loads.append(1)
        registry.register_config("late")(type("LateConfig", (), {}))

    monkeypatch.setattr(registry, "_entry_points", lambda: {"late": FakeEntryPoint(load)})
    assert registry.model_types() == ["late"]
    assert not loads
    registry.get_config("late")
    registry.get_config("late")
    assert loads == [1]


def test_failed_family_import_raises_registry_error_with_cause(empty_registry, monkeypatch):
    def load():
        raise ImportError("no module named toys")

    monkeypatch.setattr(registry, "_entry_points", lambda: {"broken": FakeEntryPoint(load)})
    with pytest.raises(RegistryError, match=r"toys\.module, which cannot be imported: no module"):
        registry.get_config("broken")


def test_the_option_tables_need_neither_jax_nor_transformers():
    code = (
        "import sys, ed_infra\n"
        "from ed_infra import dtypes, enums, errors, lazy, options, parameter_names, specs\n"
        "import ed_infra.config.fields, ed_infra.sharding.axes\n"
        "ed_infra.TaskType, ed_infra.Options, ed_infra.EasyDeLQuantizationConfig\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'transformers', 'numpy', 'torch'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_importing_ed_infra_does_not_initialize_backends():
    code = (
        "import os, sys, logging\n"
        "before = dict(os.environ), list(logging.getLogger().handlers)\n"
        "import ed_infra\n"
        "for name in ed_infra.__all__: getattr(ed_infra, name)\n"
        "from ed_infra import distributed, registry\n"
        "import ed_infra.sharding.placement, ed_infra.rope.frequencies\n"
        "from jax._src import xla_bridge\n"
        "assert (dict(os.environ), list(logging.getLogger().handlers)) == before\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ed_infra_exports_every_name():
    for name in ed_infra.__all__:
        assert getattr(ed_infra, name) is not None
    with pytest.raises(AttributeError, match="did you mean 'create_mesh'"):
        _ = ed_infra.create_mash


def test_a_lone_process_joins_nothing(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    assert distributed.initialize() is False
    assert distributed.is_main()
    distributed.barrier("test")
    with pytest.raises(ConfigError, match="num_processes, process_id missing"):
        distributed.initialize("localhost:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ConfigError, match="not a number"):
        distributed.initialize()


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ],
)
def test_distributed_launchers_are_recognized(environment: dict, several: bool):
    assert distributed._has_launcher(environment) is several


def test_once_logs_each_message_a_single_time(caplog):
    ed_logging.forget_said()
    logger = ed_logging.get_logger("ed_infra.test")
    with caplog.at_level(logging.WARNING, logger="easydel"):
        ed_logging.once(logger, "again")
        ed_logging.once(logger, "again")
    assert [record.getMessage() for record in caplog.records] == ["again"]


def test_text_that_every_python_has():
    topics = testing.english_topics()
    assert sum(map(len, topics.values())) > 300_000
    assert testing.tiny_llama(vocab_size=8)["vocab_size"] == 8


@pytest.mark.torch
def test_random_torch_llama_produces_logits(tmp_path):
    testing.require_torch()
    path = testing.random_hf_llama(tmp_path, max_shard_size="100KB", tie_word_embeddings=True)
    assert (path / "model.safetensors.index.json").exists()
    logits = testing.hf_logits(path, [[1, 2, 3]])
    assert logits.shape == (1, 3, 256)
    assert logits.std() > 0.1
