"""The import of transformers: one reading of its files, and no change of its names."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import builtins
from pathlib import Path

import transformers
from transformers.utils import import_utils

table_of = import_utils.define_import_structure
opened = []
plain = builtins.open

def counted(file, *words, **options):
    opened.append(str(file))
    return plain(file, *words, **options)

import ed_infra.config.base
builtins.open = counted
import transformers.models
builtins.open = plain
found = import_utils.define_import_structure(Path(transformers.models.__file__))
print(sum(name.endswith(".py") for name in opened))
print(found == table_of(Path(transformers.models.__file__)))
print(transformers.models.llama.configuration_llama.LlamaConfig is transformers.LlamaConfig)
print(transformers.models.auto.AutoConfig is transformers.AutoConfig)
"""


@pytest.mark.nightly
def test_files_of_models_are_read_once_and_the_names_stay_equal():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    files, *rest = done.stdout.split()
    assert int(files) < 100  # without the shared table: about 2,000
    assert rest == ["True"] * 3
