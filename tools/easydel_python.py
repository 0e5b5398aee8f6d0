"""Try what a person brings from EasyDeL in Python: names, blocks of its README, statements.

    uv run python -m tools.easydel_python CHECKOUT [--original PYTHON]

CHECKOUT is a work tree or a git directory of EasyDeL's repository. `--original` is the Python of an
environment with EasyDeL, whose names are counted. Only names of the hub and of local files are
replaced, by a tiny model and rows. A statement or block passes if it raises no error.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import cast
from unittest import mock

PAGE, README = "docs/infra/base_module.md", "README.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HUB = re.compile(r'"(?:[\w.-]+/)+[\w.-]*(?:[Ll]lama|Qwen|gpt-oss|gemma|model)[\w.-]*"')
#: What the page about base modules presupposes.
PRELUDE = """
import jax, jax.numpy as jnp, optax
import flax.nnx as nnx
import easydel as ed
from easydel import LlamaForCausalLM as MyModel
from jax.sharding import PartitionSpec
config = ed.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
    sharding_axis_dims=(1, 1, 1, 1, 1), eos_token_id=None,
)
MyModelConfig = ed.LlamaConfig
model = MyModel(config, rngs=nnx.Rngs(0)).shard_model()
input_ids = jnp.ones((1, 8), "i4")
attention_mask = jnp.ones((1, 8), "i4")
labels = input_ids
inputs = {"input_ids": input_ids}
mesh = config.mesh
partition_rules = config.get_partition_rules()
optimizer = optax.adamw(1e-4)
batch_size, sequence_length = 1, 8
tree = model.split_params()
"""
#: What the README presupposes: data and functions of the user.
README_PRELUDE = """
from datasets import Dataset
rows = Dataset.from_list([
    {"text": f"a question {i}", "prompt": f"{i}? ", "chosen": f"{i}!", "rejected": "no"}
    for i in range(16)
])
your_dataset = preference_dataset = rows.remove_columns(["prompt", "chosen", "rejected"])
your_prompts_dataset = prompts_dataset = rows.select_columns(["prompt"])
def your_custom_reward_fn(completions, **columns):
    return [float(len(str(one))) for one in completions]
your_reward_fn = your_custom_reward_fn
rngs = nnx.Rngs(0)
nn = nnx
"""
#: Pattern -> value for a machine without accelerators: models, meshes, kernels, sizes.
SMALLER = {
    r'"(?:[\w.-]+/)+[\w.-]*(?:[Ll]lama|Qwen|gpt-oss|gemma)[\w.-]*"': '"model"',
    r"EasyDeLBackends\.GPU": "EasyDeLBackends.CPU",
    r"EasyDeLPlatforms\.TRITON": "EasyDeLPlatforms.JAX",
    r"AttentionMechanisms\.FLASH_ATTN2": "AttentionMechanisms.AUTO",
    r"\((?:-?\d, ){4}-?\d\)": "(1, 1, 1, 1, 1)",
    r"\b(?:2\*\*15|8192|4096|2048|1024|512|256|128)\b": "64",
    r"(total|eval)_batch_size=\d+": r"\1_batch_size=4",
    r"num_train_epochs=\d+": "num_train_epochs=1",
    r"gradient_accumulation_steps=\d+": "gradient_accumulation_steps=1",
}


def read_page(checkout: Path, path: str) -> str:
    """Return the text of a file of a work tree or of a git directory."""
    if (checkout / path).is_file():
        return (checkout / path).read_text("utf-8")
    command = ["git", "-C", str(checkout), "show", f"HEAD:{path}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def list_blocks(text: str) -> list[str]:
    """Return the Python blocks of a page."""
    return [textwrap.dedent(block) for block in _BLOCK.findall(text)]


def list_statements(blocks: list[str]) -> Iterator[str]:
    """Yield the statements of blocks in order, without classes that only show a structure."""
    for block in blocks:
        for node in ast.parse(block).body:
            yield ast.unparse(node)


def count_names(original: str) -> tuple[int, dict[str, str]]:
    """Return the number of names of the original, and the missing ones with their errors."""
    code = "import easydel, json; print(json.dumps([n for n in dir(easydel) if n[0] != '_']))"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    done = subprocess.run(
        [original, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    names = json.loads(done.stdout.strip().splitlines()[-1])
    import easydel

    missing = {}
    for name in names:
        try:
            reduce(getattr, name.split("."), easydel)
        except (AttributeError, ImportError) as error:
            missing[name] = str(error)
    return len(names), missing


def try_statements(statements: Iterator[str], folder: Path) -> dict[str, str]:
    """Return each statement with its error, or an empty text; all share one namespace.

    A failed statement does not end the trial. The model is that of the prelude for each statement,
    so that an earlier statement does not decide a later one.
    """
    out: dict[str, str] = {}
    upload = mock.patch("ed_models.base.export.push_to_hub")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), upload:
        start: dict[str, object] = {}
        exec(PRELUDE, start)
        start["model"].save_pretrained("model")  # type: ignore[attr-defined]
        namespace = dict(start)
        for number, statement in enumerate(statements):
            source = _HUB.sub('"model"', statement).replace("'organization/model-name'", "'model'")
            source = source.replace("'model-name'", "'model'")
            namespace |= {name: start[name] for name in ("model", "MyModel", "config", "labels")}
            try:
                exec(source, namespace)
            except Exception as error:  # each statement may fail in its own way
                out[f"{number}: {statement}"] = f"{type(error).__name__}: {error}"
            else:
                out[f"{number}: {statement}"] = ""
    return out


def list_errors(results: Mapping[str, str]) -> list[str]:
    """Return a line for each failed statement or block."""
    return [f"{name.splitlines()[0]} -> {error[:200]}" for name, error in results.items() if error]


def try_blocks(blocks: list[str], folder: Path) -> dict[str, str]:
    """Return each complete block with its error, or an empty text; all share one namespace.

    A complete block imports `easydel` and has no `...` in place of a value.
    """
    out: dict[str, str] = {}
    write_model(folder / "model")
    namespace: dict[str, object] = {}
    exec(PRELUDE, namespace)
    exec(README_PRELUDE, namespace)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(mock.patch("datasets.load_dataset", return_value=namespace["rows"]))
        stack.enter_context(mock.patch("ed_esurge.server.launch.serve"))
        stack.enter_context(mock.patch("ed_models.base.methods.EasyBridgeMixin.push_to_hub"))
        for number, block in enumerate(blocks):
            if "easydel" not in block or "(...)" in block or ", ...)" in block:
                continue
            source = block
            for pattern, value in SMALLER.items():
                source = re.sub(pattern, value, source)
            try:
                exec(source, namespace)
            except Exception as error:  # each block may fail in its own way
                out[f"block {number}"] = f"{type(error).__name__}: {error}"
            else:
                out[f"block {number}"] = ""
    return out


def write_model(folder: Path) -> None:
    """Save a random model with a tokenizer and a chat template."""
    from ed_data.tokens.bpe import train_bpe
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    tokenizer = train_bpe(["a question? and an answer! user assistant"] * 9, vocab_size=290)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder, tokenizer=tokenizer)


def main() -> int:
    """Print the table, and the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--original", help="Python of an environment with EasyDeL")
    arguments = parser.parse_args()
    details = []
    print("| what a person brings | works |\n| --- | --- |")
    if arguments.original:
        total, missing = count_names(arguments.original)
        print(
            f"| names of `import easydel as ed` | {total - len(missing)} of {total} |", flush=True
        )
        details += [f"{name}: {error}" for name, error in missing.items()]
    with tempfile.TemporaryDirectory() as name:
        blocks = list_blocks(read_page(arguments.checkout, PAGE))
        results = try_statements(list_statements(blocks), Path(name))
        good = sum(not error for error in results.values())
        print(f"| statements about base modules | {good} of {len(results)} |", flush=True)
        details += list_errors(results)
    with tempfile.TemporaryDirectory() as name:
        results = try_blocks(list_blocks(read_page(arguments.checkout, README)), Path(name))
        good = sum(not error for error in results.values())
        print(f"| complete blocks of README.md | {good} of {len(results)} |", flush=True)
        details += list_errors(results)
    print("\n".join(["", *details]))
    return int(bool(details))


if __name__ == "__main__":
    sys.exit(main())
