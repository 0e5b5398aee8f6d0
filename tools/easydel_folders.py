"""Count the folders of the original EasyDeL whose weights are read bit for bit.

`EASYDEL_PYTHON` names the interpreter of an environment with `easydel` and `torch`, in which the
programs of `tools/easydel` write the folders.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from ed_models.checkpoints.easydel_layout import HEAD_MODULES
from ed_models.checkpoints.pickled_files import open_tensors
from ed_models.checkpoints.tensor_files import TensorFiles

from tools.easydel.save_folders import FAMILIES
from tools.workspace import ROOT

#: Names of the language model in EasyDeL -> names in the folder of transformers.
_INNER = {"model.language_model.": "model.language_model.model."}
#: The names of each family whose two folders differ.
_RENAMED = {
    **dict.fromkeys(("gemma3", "aya_vision", "mistral3"), _INNER),
    "llava": {**_INNER, "lm_head.": "language_model.lm_head."},
}


def run_original(*arguments: str | Path, python: str, devices: int = 1) -> str:
    """Run a program in the environment of the original, and return its output.

    Raises:
        RuntimeError: the program has failed.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"JAX_PLATFORMS": "cpu"}
    env |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [python, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/", check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def write_folders(out: Path, python: str, families: Sequence[str] = ()) -> None:
    """Write the folder `OUT/FAMILY` of each family with the original."""
    run_original(ROOT / "tools/easydel/save_folders.py", out, *families, python=python)


def assert_equal_tensors(source: TensorFiles, saved: TensorFiles) -> None:
    """Compare tensors bit for bit; a copy of a tied head and a lost bias of zeros may differ."""
    extra = [name for name in saved if name not in source]
    assert all(name.partition(".")[0] in HEAD_MODULES for name in extra), extra
    for name in source:
        if name == "lm_head.bias" and name not in saved:
            assert not source.read(name).any(), name
        else:
            np.testing.assert_array_equal(saved.read(name), source.read(name), name)


def compare_family(folder: Path) -> None:
    """Compare the folder that the original saved with the folder of transformers.

    Raises:
        AssertionError: a tensor differs.
    """
    saved, renamed = open_tensors(folder / "saved"), _RENAMED.get(folder.name, {})
    saved = saved.rename_tensors({name: _rename_tensor(name, renamed) for name in saved})
    assert_equal_tensors(open_tensors(folder / "source"), saved)


def _rename_tensor(name: str, renamed: Mapping[str, str]) -> str:
    prefix = next((prefix for prefix in renamed if name.startswith(prefix)), "")
    return renamed.get(prefix, prefix) + name.removeprefix(prefix)


def try_folders(out: Path) -> dict[str, str]:
    """Return each family with its error, or an empty text."""
    results = {}
    for family in FAMILIES:
        try:
            compare_family(out / family)
        except Exception as error:  # a broken folder raises errors of several kinds
            results[family] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        else:
            results[family] = ""
    return results
