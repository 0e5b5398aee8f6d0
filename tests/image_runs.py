"""Runs of training with images, from run files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ed_elarge.__main__ import run_file
from safetensors.numpy import load_file


def trained(made: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Run a document, and return the logged figures and the arrays of the saved model, if any."""
    directory = Path(made["trainer"]["save_directory"])
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(made))
    assert run_file(str(file)) == 0
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    saved = directory / "model"
    if not (saved / "model.safetensors").is_file():
        return [json.loads(line) for line in lines], {}
    return [json.loads(line) for line in lines], load_file(saved / "model.safetensors")
