"""Try what a person brings from EasyDeL in Python: names, blocks, statements, scripts.

`tools.easydel_beside` prints the table. Only names of the hub and of local files are replaced, by
tiny models, rows, an image and a recording. A statement or block passes if it raises no error.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

from tools.workspace import ROOT

#: The page about base modules, and the overview of the same folder.
PAGES = ("docs/infra/base_module.md", "docs/infra/overview.md")
#: The section of the page that manages adapters, which the model then has.
LORA_SECTION = "Managing LoRA Parameters"
#: Names of the prelude that each statement finds unchanged.
_RESET = ("model", "MyModel", "config", "labels")
STAND_INS = ("model", "whisper", "vision", "image.jpg", "audio.wav", "your-dataset")
_BLOCK = re.compile(r"^( *)```(?:python|py)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r"^\s*(?:import|from) easydel", re.MULTILINE)
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
tree = params = model.split_params()
loss_config = ed.LossConfig()
from easydel import EasyBridgeMixin, EasyDeLBaseModule, EasyGenerationMixin
"""
#: What the README presupposes: data and functions of the user.
README_ROWS = """
from datasets import Dataset
rows = Dataset.from_list([
    {"text": f"a question {i}", "prompt": f"{i}? ", "chosen": f"{i}!", "rejected": "no"}
    for i in range(16)
])
"""
README_PRELUDE = f"""{README_ROWS}
your_dataset = preference_dataset = rows.remove_columns(["prompt", "chosen", "rejected"])
your_prompts_dataset = prompts_dataset = rows.select_columns(["prompt"])
def your_custom_reward_fn(completions, **columns):
    return [float(len(str(one))) for one in completions]
your_reward_fn = your_custom_reward_fn
rngs = nnx.Rngs(0)
nn = nnx
config = config.replace(scan_layers=False)
"""
#: Pattern -> value for a machine without accelerators: models, meshes, kernels, sizes.
SMALLER = {
    r'"openai/whisper[\w.-]*"': '"whisper"',
    r'"(?:https://|path/)[^"]*\.(?:wav|mp3)"': '"audio.wav"',
    r'"[\w.-]+/[\w.-]*Vision[\w.-]*"': '"vision"',
    r"max_model_len=\d+": "max_model_len=1024",
    r'"flash_attn2"': '"auto"',
    r"= LlamaConfig\(\n(?=\s+attn_mechanism)": "= LlamaConfig(\n"
    "    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,\n"
    "    num_attention_heads=4, num_key_value_heads=2,\n",
    r'"triton"': '"jax"',
    r"\(\.\.\.\)": "()",
    r"generate\(\*\*inputs\)": "generate(**inputs, max_new_tokens=32)",
    r'"(?:[\w.-]+/)+[\w.-]*(?:[Ll]lama|Qwen|gpt-oss|gemma)[\w.-]*"': '"model"',
    r"EasyDeLBackends\.GPU": "EasyDeLBackends.CPU",
    r"EasyDeLPlatforms\.TRITON": "EasyDeLPlatforms.JAX",
    r"AttentionMechanisms\.FLASH_ATTN2": "AttentionMechanisms.AUTO",
    r"\((?:-?\d, ){4}-?\d\)": "(1, 1, 1, 1, 1)",
    r"(?<!max_model_len=)\b(?:2\*\*15|8192|4096|2048|1024|512|256|128)\b": "64",
    r"(total|eval)_batch_size=\d+": r"\1_batch_size=4",
    r"num_train_epochs=\d+": "num_train_epochs=1",
    r"step_start_point=\d+": "step_start_point=2",
    r"use_wandb=True": "use_wandb=False",
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
    return [textwrap.dedent(block) for _, block in _BLOCK.findall(text)]


def list_readme_blocks(text: str) -> dict[str, str]:
    """Return the blocks of the README that name `easydel`, also those that only show a form."""
    blocks = enumerate(list_blocks(text))
    return {f"README block {number}": block for number, block in blocks if "easydel" in block}


def list_document_blocks(root: Path) -> dict[str, str]:
    """Return the complete Python blocks of the documents.

    A complete block imports `easydel`, defines every name that it uses, and imports no module that
    the reader writes. The pages of `easydata` describe another library and do not count.
    """
    blocks = {}
    for path in sorted((root / "docs").rglob("*.md")):
        if "easydata" in path.parts:
            continue
        for number, block in enumerate(list_blocks(path.read_text("utf-8"))):
            if _IMPORT.search(block) and "easydel.modules.my_" not in block and _is_closed(block):
                blocks[f"{path.relative_to(root)}: block {number}"] = block
    return blocks


#: Runs blocks of a JSON mapping on stdin in the original, and prints their errors as JSON.
_TRY = """
import json, sys, types
errors = {}
for name, block in json.load(sys.stdin).items():
    module = sys.modules["block"] = types.ModuleType("block")
    try:
        exec(block, vars(module))
        errors[name] = ""
    except BaseException as error:
        errors[name] = f"{type(error).__name__}: {error}"[:120]
print(json.dumps(errors))
"""


def try_original(python: str, blocks: Mapping[str, str]) -> dict[str, str]:
    """Return the error of each block in the original, or an empty text; nothing is replaced."""
    if not blocks:
        return {}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    done = subprocess.run(
        [python, "-c", _TRY],
        input=json.dumps(blocks), capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def _is_closed(block: str) -> bool:
    """Return whether a block parses and defines every name that it reads."""
    try:
        nodes = list(ast.walk(ast.parse(block)))
    except SyntaxError:
        return False
    defined, read = set(dir(builtins)), set()
    for node in nodes:
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    return read <= defined


class Statement(NamedTuple):
    """A statement at the top level of a block.

    Attributes:
        name: Its place.
        source: Its text.
        size: The number of statements, with those in its body.
        section: The headline of the page above it.
    """

    name: str
    source: str
    size: int
    section: str


def list_statements(page: str, path: str) -> Iterator[Statement]:
    """Yield the statements of a page in order."""
    for match in _BLOCK.finditer(page):
        section = page[: match.start()].rpartition("\n### ")[2].partition("\n")[0]
        for node in ast.parse(textwrap.dedent(match.group(2))).body:
            size = sum(isinstance(one, ast.stmt) for one in ast.walk(node))
            source = ast.unparse(node)
            yield Statement(f"{path}: {source.splitlines()[0]}", source, size, section)


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


def try_statements(statements: Iterable[Statement], folder: Path) -> dict[Statement, str]:
    """Return each statement with its error, or an empty text; all share one namespace.

    A failed statement does not end the trial. The model is that of the prelude for each statement,
    so that an earlier statement does not decide a later one. A function is also called, with the
    values that its parameters have as names.
    """
    out: dict[Statement, str] = {}
    with _stand_ins(folder):
        start: dict[str, Any] = {}
        exec(PRELUDE, start)
        start["model"].save_pretrained("model")
        adapted = {"model": start["model"].apply_lora_to_layers(4, ".*q_proj.*")}
        namespace = dict(start)
        for statement in statements:
            source = _HUB.sub('"model"', statement.source.replace("'", '"'))
            source = source.replace('"model-name"', '"model"')
            namespace |= {name: start[name] for name in _RESET}
            namespace |= adapted if statement.section == LORA_SECTION else {}
            try:
                exec(source, namespace)
                _call_functions(source, namespace)
            except Exception as error:  # each statement may fail in its own way
                out[statement] = f"{type(error).__name__}: {error}"
            else:
                out[statement] = ""
    return out


def _call_functions(source: str, namespace: dict[str, Any]) -> None:
    """Call the functions that a statement defines, and create models of its classes."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            namespace[node.name](*(namespace[one.arg] for one in node.args.args))
        elif isinstance(node, ast.ClassDef) and "__init__" in source:
            namespace[node.name](namespace["config"], rngs=namespace["nnx"].Rngs(0))


def try_blocks(
    blocks: Mapping[str, str], models: Path, kind: str, *, together: bool
) -> dict[str, str]:
    """Return each block with its error, or an empty text.

    Each block runs in its own folder with the models, because runs of several blocks would have one
    save directory.

    Args:
        blocks: The blocks.
        models: A folder with the models of `write_models`.
        kind: First part of the names of the blocks' folders.
        together: Whether the blocks share the names of the README.
    """
    out: dict[str, str] = {}
    shared = types.ModuleType("block")
    if together:
        exec(PRELUDE, vars(shared))
        exec(README_PRELUDE, vars(shared))
    for number, (name, block) in enumerate(blocks.items()):
        place = _make_place(models, f"{kind}{number}")
        for pattern, value in SMALLER.items():
            block = re.sub(pattern, value, block)
        module = shared if together else types.ModuleType("block")
        try:
            with _stand_ins(place), replace_modules({"block": module}):
                exec(block, vars(module))
        except (Exception, SystemExit) as error:  # each block may fail in its own way
            out[name] = f"{type(error).__name__}: {error}"
        else:
            out[name] = ""
    return out


@contextlib.contextmanager
def replace_modules(modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Replace modules by name, and keep the other modules that the body imports.

    `mock.patch.dict` forgets the modules that the body imports. A later block would import them
    again, so that each class exists twice and a native library registers its types twice.
    """
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@contextlib.contextmanager
def _stand_ins(folder: Path) -> Iterator[None]:
    """Work in a folder, without the hub, a server and the output of a program."""
    rows: dict[str, Any] = {}
    exec(README_ROWS, rows)
    librosa = types.ModuleType("librosa")
    librosa.__spec__ = ModuleSpec("librosa", None)  # transformers asks for it
    vars(librosa)["load"] = _load_recording
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(replace_modules({"librosa": librosa}))
        stack.enter_context(mock.patch("datasets.load_dataset", return_value=rows["rows"]))
        stack.enter_context(mock.patch("ed_esurge.server.launch.serve"))
        stack.enter_context(mock.patch("ed_models.base.methods.EasyBridgeMixin.push_to_hub"))
        yield


def _load_recording(name: str, sr: int) -> tuple[Any, int]:
    """Return samples and rate, as `librosa.load` does."""
    import soundfile

    samples, rate = soundfile.read(name, dtype="float32")
    if rate != sr:
        raise ValueError(f"{name} has the rate {rate}, not {sr}")
    return samples, rate


def _make_place(models: Path, name: str) -> Path:
    """Return a folder beside the models, with links to them."""
    place = models / name
    place.mkdir()
    for entry in STAND_INS:
        (place / entry).symlink_to(models / entry)
    return place


def try_scripts(models: Path) -> dict[str, str]:
    """Return each script of `tests/guides/easydel_scripts` with its error, or an empty text."""
    out = {}
    for path in sorted((ROOT / "tests/guides/easydel_scripts").glob("*.py")):
        place = _make_place(models, path.stem)
        cache = {"ED_DATA_CACHE": str(place / "cache")}
        try:
            with (
                contextlib.chdir(place),
                contextlib.redirect_stdout(io.StringIO()),
                mock.patch.dict(os.environ, cache),
            ):
                runpy.run_path(str(path), run_name="__main__")
        except (Exception, SystemExit) as error:  # each script may fail in its own way
            out[path.name] = f"{type(error).__name__}: {error}"
        else:
            out[path.name] = ""
    return out


def write_models(folder: Path) -> None:
    """Write the models, the image and the recording that replace those of the hub."""
    import soundfile
    from PIL import Image

    from tests.speech_cases import RATE, recording, write_whisper

    write_model(folder / "model")
    (folder / "whisper").mkdir()
    write_whisper(folder / "whisper")
    write_vision_model(folder / "vision")
    Image.new("RGB", (30, 40), (200, 30, 9)).save(folder / "image.jpg")
    (folder / "your-dataset").mkdir()
    rows = [json.dumps({"content": f"a question {number}"}) for number in range(16)]
    (folder / "your-dataset/train.jsonl").write_text("\n".join(rows))
    soundfile.write(folder / "audio.wav", recording(1.0), RATE)


def write_vision_model(folder: Path) -> None:
    """Save a random LLaVA with its processor."""
    from ed_data.tokens.bpe import train_bpe
    from ed_models.families.llava import LlavaConfig, LlavaForConditionalGeneration
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = train_bpe(["describe this image in detail user"] * 9, vocab_size=290)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2}
    fields: dict[str, Any] = {
        "text_config": {"model_type": "llama", "vocab_size": len(tokenizer), **sizes},
        "vision_config": {"image_size": 28, "patch_size": 14, **sizes},
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
    }
    config = LlavaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    LlavaForConditionalGeneration.create(config, seed=5).save_pretrained(folder)
    square = {"height": 28, "width": 28}
    template = (
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=square),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)


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
        max_position_embeddings=2048,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder, tokenizer=tokenizer)
