"""Folders of the original EasyDeL, against torch: weights, logits, training, LoRA, and writing.

`EASYDEL_PYTHON` names the interpreter of an environment with `easydel` and `torch`. Two programs
in `tools/easydel` write the folders there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.testing import require_torch
from ed_models.checkpoints import hub
from ed_models.checkpoints.checks import detect_task
from ed_models.checkpoints.easydel_folder import EasyDeLFiles, read_easydel_moments
from ed_models.checkpoints.easydel_layout import WRITTEN_FAMILIES
from ed_models.checkpoints.easydel_writer import save_easydel_folder
from ed_models.checkpoints.pickled_files import open_tensors
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_trainers import EasyDeLState
from ed_trainers.checkpoints.easydel_state import continue_easydel_run
from flax import nnx
from safetensors.numpy import save_file

from tools import easydel_folders
from tools.easydel.save_folders import IMAGE_FAMILIES
from tools.easydel.save_training import STATES
from tools.easydel_folders import assert_equal_tensors, compare_family
from tools.workspace import ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.torch, pytest.mark.timeout(3600)]
ONE: dict[str, Any] = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
TEXT_FAMILIES = [name for name in WRITTEN_FAMILIES if name not in ("whisper", "llava")]
RATE, DECAY = 1e-2, 1e-4


def run_original(*arguments: str | Path, devices: int = 1) -> str:
    """Run a program in the environment of the original, and return its output."""
    python = os.environ.get("EASYDEL_PYTHON")
    if not python:
        pytest.skip("EASYDEL_PYTHON names no interpreter with easydel")
    return easydel_folders.run_original(*arguments, python=python, devices=devices)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("original")
    run_original(ROOT / "tools/easydel/save_folders.py", out)
    run_original(ROOT / "tools/easydel/save_training.py", out)
    return out


@pytest.mark.parametrize("family", WRITTEN_FAMILIES)
def test_folder_has_the_weights_of_its_source(folders: Path, family: str) -> None:
    compare_family(folders / family)


def test_folder_with_experts_on_the_wrong_axis_is_refused(folders: Path) -> None:
    """EasyDeL's import of DeepSeek's fused experts; all other families are equal."""
    with pytest.raises(CheckpointError, match="of another shape"):
        hub.from_pretrained(folders / "deepseek_v3" / "saved", **ONE)


def test_folder_of_eight_devices_has_the_weights_of_its_source(tmp_path: Path) -> None:
    families = ("llama", "mixtral", "gpt_oss")
    run_original(ROOT / "tools/easydel/save_folders.py", tmp_path, *families, devices=8)
    for family in families:
        source = open_tensors(tmp_path / family / "source")
        assert_equal_tensors(source, open_tensors(tmp_path / family / "saved"))
    chunks = tmp_path / "llama/saved/model/lm_head/kernel"
    assert len([file for file in chunks.iterdir() if file.name != ".zarray"]) == 8


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_logits_equal_those_of_torch(folders: Path, family: str) -> None:
    stored = np.load(folders / family / "logits.npz")
    with jax.default_matmul_precision("highest"):
        model: Any = hub.from_pretrained(folders / family / "saved", **ONE)
        logits = model(jnp.asarray(stored["input_ids"], jnp.int32)).logits
    np.testing.assert_allclose(logits, stored["logits"], atol=5e-5)


@pytest.mark.parametrize("family", ["gemma3", "aya_vision", "clip"])
@pytest.mark.parametrize("which", ["source", "saved"])
def test_logits_of_images_equal_those_of_torch(folders: Path, family: str, which: str) -> None:
    """`source` is a folder of transformers 5, and `saved` one of EasyDeL."""
    stored = np.load(folders / family / "logits.npz")
    inputs = {name: jnp.asarray(stored[name]) for name in ("input_ids", "pixel_values")}
    task = detect_task(folders / family / "source")
    with jax.default_matmul_precision("highest"):
        model: Any = hub.from_pretrained(folders / family / which, task=task, **ONE)
        output = model(**inputs)
    logits = output.logits_per_image if family == "clip" else output.logits
    np.testing.assert_allclose(logits, stored["logits"], atol=5e-5)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_folder_with_images_has_the_weights_of_its_source(folders: Path, family: str) -> None:
    compare_family(folders / family)


def load_torch(tensors: Mapping[str, np.ndarray], source: Path, folder: Path) -> Any:
    """Return the model of torch with tensors by name, which transformers reads from a folder."""
    torch = require_torch()
    import transformers

    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    names = set(open_tensors(source))  # without the copy of a tied head
    source_tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items() if name in names}
    assert source_tensors.keys() == names
    save_file(source_tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def read_tensors(files: TensorFiles) -> dict[str, np.ndarray]:
    return {name: np.array(files.read(name)) for name in files}


def train_torch(model: Any, moments: tuple[Any, ...], ids: Any) -> list[float]:
    """Return the losses of three steps of AdamW that continue after two.

    Args:
        moments: two models with the moments in the place of their weights.
        ids: token ids.
    """
    torch = require_torch()
    tx = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    triples = zip(*(tree.parameters() for tree in (model, *moments)), strict=True)
    for parameter, mu, nu in triples:
        values = {"exp_avg": mu.detach().clone(), "exp_avg_sq": nu.detach().clone()}
        tx.state[parameter] = {"step": torch.tensor(2.0), **values}
    losses = []
    for _ in range(3):
        tx.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        )
        loss.backward()
        tx.step()
        losses.append(float(loss.detach()))
    return losses


def train_here(state: EasyDeLState, ids: np.ndarray) -> list[float]:
    tokens = jnp.asarray(ids, jnp.int32)

    @jax.jit
    def step(state: EasyDeLState) -> tuple[EasyDeLState, jax.Array]:
        def compute_loss(graphstate: nnx.State) -> jax.Array:
            model: Any = nnx.merge(state.graphdef, graphstate, state.graphother)
            logits = model(tokens).logits[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(compute_loss)(state.graphstate)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(3):
        state, loss = step(state)
        losses.append(float(loss))
    assert int(state.step) == 5
    return losses


@pytest.mark.parametrize("family", STATES)
def test_training_continues_as_in_torch(folders: Path, family: str, tmp_path: Path) -> None:
    folder, source = folders / "state" / family, folders / family / "source"
    ids = np.load(folders / family / "logits.npz")["input_ids"]
    stored = read_easydel_moments(folder)
    assert (stored.step, stored.updates) == (2, 2)
    files = [EasyDeLFiles.relate(arrays, folder) for arrays in (stored.mu, stored.nu)]
    model, *moments = [
        load_torch(read_tensors(tensors), source, tmp_path / str(number))
        for number, tensors in enumerate([open_tensors(folder), *files])
    ]
    expected = train_torch(model, tuple(moments), require_torch().tensor(ids))
    with jax.default_matmul_precision("highest"):
        state = EasyDeLState.load_state(folder, tx=optax.adamw(RATE, weight_decay=DECAY))
        losses = train_here(state, ids)
    np.testing.assert_allclose(losses, expected, rtol=2e-4)


def test_run_of_the_trainer_continues(folders: Path) -> None:
    unrolled = {"scan_layers": False}  # as in EasyDeL's config.json
    model: Any = hub.from_pretrained(folders / "llama" / "source", config_kwargs=unrolled, **ONE)
    state = EasyDeLState.create(model=model, tx=optax.adamw(RATE), init_opt_state=True)
    messages: list[str] = []
    continued: Any = continue_easydel_run(state, folders / "run", messages.append)
    assert (int(continued.step), int(continued.opt_state[0].count)) == (2, 2)
    assert "run-2" in messages[0]
    saved: Any = hub.from_pretrained(folders / "run" / "tiny", **ONE)
    pairs = zip(*map(jax.tree.leaves, (continued.graphstate, nnx.state(saved))), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


def test_other_optimizer_is_refused(folders: Path) -> None:
    with pytest.raises(CheckpointError, match="another optimizer than AdamW"):
        EasyDeLState.load_state(folders / "lion", tx=optax.adamw(RATE))


def test_adapters_compute_the_logits_of_torch(folders: Path, tmp_path: Path) -> None:
    torch = require_torch()
    files = open_tensors(folders / "lora")
    weights = read_tensors(files)
    for layer, (a, b) in files.read_adapters().items():
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + (a @ b).T
    theirs = load_torch(weights, folders / "llama" / "source", tmp_path / "merged")
    ids = np.load(folders / "llama" / "logits.npz")["input_ids"]
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        model: Any = hub.from_pretrained(folders / "lora", **ONE)
        logits = model(jnp.asarray(ids, jnp.int32)).logits
    np.testing.assert_allclose(logits, expected, atol=5e-5)
    state = EasyDeLState.load_state(folders / "lora_state", tx=optax.adamw(RATE))
    assert len(jax.tree.leaves(state.graphstate)) < len(jax.tree.leaves(state.graphother))


_LOAD = """
import sys
import easydel as ed, jax.numpy as jnp, numpy as np
from flax import nnx
for family in sys.argv[3:]:
    classes = {"whisper": "SpeechSeq2Seq", "llava": "ImageTextToText"}
    auto = getattr(ed, "AutoEasyDeLModelFor" + classes.get(family, "CausalLM"))
    states = []
    for folder in (f"{sys.argv[1]}/{family}/saved", f"{sys.argv[2]}/{family}"):
        model = auto.from_pretrained(
            folder, dtype=jnp.float32, param_dtype=jnp.float32, sharding_axis_dims=(1, 1, 1, 1, 1)
        )
        state = nnx.split(model, nnx.Param, ...)[1]
        states.append({path: v.value for path, v in nnx.to_flat_state(state)})
    first, second = states
    assert first.keys() == second.keys(), family
    assert all(np.array_equal(first[path], second[path]) for path in first), family
    print(family, "equal", flush=True)
"""


def test_original_loads_folders_written_here(folders: Path, tmp_path: Path) -> None:
    original, written = tmp_path / "original", tmp_path / "written"
    for family in WRITTEN_FAMILIES:
        shutil.copytree(folders / family / "saved", original / family / "saved")
        source = folders / family / "source"
        model: Any = hub.from_pretrained(source, task=detect_task(source), **ONE)
        save_easydel_folder(model, written / family)
    # transformers reads a Mistral with layer_types as Ministral, which EasyDeL lacks: EasyDeL does
    # not load the folder that it has saved.
    config = original / "mistral" / "saved" / "config.json"
    fields = json.loads(config.read_text("utf-8"))
    del fields["layer_types"]
    config.write_text(json.dumps(fields), "utf-8")
    output = run_original("-c", _LOAD, original, written, *WRITTEN_FAMILIES)
    assert output.count("equal") == len(WRITTEN_FAMILIES)
