"""Tests import shared modules by name: `attention_cases`, `attention_reference`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
