"""EasyLM's classes: checkpoints are read as they are at the time of the call."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ed_elarge.easylm import CheckpointManager, LLaMAModel
from ed_elarge.easylm.checkpoints import parse_address
from ed_infra.errors import ConfigError
from ed_trainers.convert import convert
from ed_trainers.easylm import open_arrays, write_stream, write_tree

KINDS = ("", "params::", "trainstate_params::", "flax_params::", "checkpoint")


def read_arrays(stream: Path) -> dict[str, np.ndarray]:
    arrays = open_arrays(stream)
    return {name: arrays.read(name) for name in arrays}


def write_checkpoint(kind: str, folder: Path, source: Path, scale: float) -> str:
    """Write the model of a directory with a scaled embedding, and return its address."""
    if kind == "checkpoint":
        from ed_models.families.llama import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(source, sharding_axis_dims=(1,) * 5)
        embedding = model.model.embed_tokens.embedding
        embedding[...] = embedding[...] * scale
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        CheckpointManager(folder / "checkpoints").save(model, step=3)
        return str(folder / "checkpoints/3")
    stream = convert(source, folder / "source", easylm=True)
    arrays = read_arrays(stream)
    stream.unlink()
    arrays["transformer/wte/embedding"] = arrays["transformer/wte/embedding"] * scale
    path = folder / "streaming_params"
    if kind == "flax_params::":
        write_tree(path, arrays.items())
    else:
        lead = "params/params/" if kind == "trainstate_params::" else ""
        write_stream(path, ((f"{lead}{name}", array) for name, array in arrays.items()))
    return f"{kind}{path}"


def embedding_of(model: LLaMAModel) -> np.ndarray:
    return np.asarray(model.module.model.embed_tokens.embedding[...], np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_load_checkpoint_returns_the_present_weights_of_an_overwritten_file(
    kind: str, quickstart_model: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = {} if kind == "checkpoint" else {"config": quickstart_model}
    address = write_checkpoint(kind, tmp_path, quickstart_model, 1.0)
    file = Path(address.rpartition("::")[2])
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    first = embedding_of(LLaMAModel.load_checkpoint(address, **config))
    assert write_checkpoint(kind, tmp_path, quickstart_model, 3.0) == address
    os.utime(file, ns=times)  # neither the size nor the time tells the two files apart
    second = embedding_of(LLaMAModel.load_checkpoint(address, **config))
    np.testing.assert_allclose(second, 3 * first, rtol=1e-6)


@pytest.mark.nightly
def test_load_checkpoint_leaves_no_copy_of_the_model(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = write_checkpoint("params::", tmp_path / "runs", quickstart_model, 1.0)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    model = LLaMAModel.load_checkpoint(address, config=quickstart_model)
    assert model.elm.config.model is not None
    assert model.elm.config.model.name_or_path.endswith("streaming_params")
    assert len(model.elm.build_tokenizer()) == 320
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["streaming_params"]
    del model
    gc.collect()
    jax.clear_caches()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_address_of_a_checkpoint_has_a_known_kind(tmp_path: Path) -> None:
    assert parse_address("flax_params::gs://a/b") == ("flax_params", "gs://a/b")
    assert parse_address("folder/file") == ("params", "folder/file")
    with pytest.raises(ConfigError, match="did you mean 'params'"):
        parse_address("param::file")
    file = tmp_path / "streaming_train_state"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"trainstate_params::.*streaming_train_state"):
        LLaMAModel.load_checkpoint(f"trainstate::{file}")
