"""Measure prompts with images against torch, and training steps with a frozen vision encoder.

    uv run python -m tools.bench.vision prompts
    uv run python -m tools.bench.vision training
    uv run python -m tools.bench.vision prompts --shape tiny --images 1 --rounds 1     a trial

The models have random weights: the language model of SmolLM2-135M and a vision tower of the size of
ViT-B. Runs are interleaved, so that a slow moment of the machine affects all rows.

`prompts` compares the first token after a prompt with images and 64 tokens of text: the vision
tower, the projector and the language model with its keys and values. Both contenders load one
checkpoint. Ours is the engine (`eSurge.generate` with one token), without prefix cache; torch runs
the model with a cache and the head of the last position. Each round has other images, so no encoder
output is reused. The float32 tokens are compared first. A cell contains the median in milliseconds,
and the ratio to torch in the same number format; above 1 = faster than torch. On a GPU,
`JAX_DEFAULT_MATMUL_PRECISION=highest` makes both contenders compute float32 products in float32;
jax would use TF32.

`training` trains the language model on all tokens by AdamW; the tower and the projector are frozen.
A step includes the preparation of its batch. A cell contains the median in milliseconds, and the
speed relative to `without`. Rows of the table:

- without: each step encodes its images;
- kept: `image_feature_cache_gib`, all images were encoded earlier, as in later epochs;
- new images: the same with images that the encoder has not seen, as in the first epoch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import (
    Run,
    Timed,
    all_turns,
    command_line,
    cores,
    machine,
    table,
    torch_device,
)

_TEXT = {
    "vocab_size": 32000,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
_SMOL = {**_TEXT, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
_TINY = {**_TEXT, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2}
_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
IMAGE = 31999
#: Configurations: the language model of SmolLM2-135M with a vision tower of the size of ViT-B.
#: LLaVA reads images of 336 x 336 pixels with 576 features; Qwen2-VL reads 448 x 448 pixels with
#: 256 features.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "llava",
        {
            "text_config": {"model_type": "llama", **_SMOL},
            "vision_config": {
                "model_type": "clip_vision_model",
                "num_attention_heads": 12,
                "image_size": 336,
                "patch_size": 14,
                **_BASE,
            },
            "image_token_index": IMAGE,
        },
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {
            "text_config": {**_SMOL, "rope_parameters": _ROPE},
            "vision_config": {
                "depth": 12,
                "embed_dim": 768,
                "hidden_size": 576,
                "num_heads": 12,
                "patch_size": 14,
            },
            "image_token_id": IMAGE,
        },
    ),
    "tiny": (
        "qwen2_vl",
        {
            "text_config": {
                **_TINY,
                "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "depth": 2,
                "embed_dim": 24,
                "hidden_size": 72,
                "num_heads": 3,
                "patch_size": 14,
            },
            "image_token_id": IMAGE,
        },
    ),
}
WORDS = 64
Arrays = dict[str, np.ndarray]


def prompt(shape: str, images: int, seed: int) -> tuple[np.ndarray, Arrays]:
    """Return the tokens of a prompt, and the arrays of its images as processors return them."""
    rng, (kind, _) = np.random.default_rng(seed), SHAPES[shape]
    if kind == "llava":
        features = 576
        arrays = {"pixel_values": rng.normal(size=(images, 3, 336, 336)).astype(np.float32)}
    else:
        features = 256
        patches = rng.normal(size=(images * 32 * 32, 3 * 2 * 14 * 14)).astype(np.float32)
        grids = np.array([[1, 32, 32]] * images)
        arrays = {"pixel_values": patches, "image_grid_thw": grids}
    words = rng.integers(100, IMAGE - 10, (images + 1, WORDS // (images + 1)))
    ids = [*words[0]]
    for number in range(images):
        ids += [IMAGE] * features + [*words[number + 1]]
    return np.array(ids), arrays


class Torch:
    """`transformers` on torch."""

    def __init__(self, directory: Path, dtype: str):
        import torch
        from transformers import AutoModelForImageTextToText

        self.torch, self.dtype = torch, getattr(torch, dtype)
        kind: Any = AutoModelForImageTextToText
        self.model = kind.from_pretrained(directory, dtype=self.dtype).eval().to(torch_device())

    def __call__(self, ids: np.ndarray, arrays: Arrays) -> int:
        """Return the first token after a prompt."""
        torch = self.torch
        device = torch_device()
        given = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
        given["pixel_values"] = given["pixel_values"].to(self.dtype)
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = torch.from_numpy((ids == IMAGE).astype(np.int32)[None]).to(
                device
            )
        with torch.inference_mode():
            tokens = torch.from_numpy(ids)[None].to(device)
            out = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **given)
        return int(out.logits[0, -1].argmax())


class Ours:
    """The engine of this project."""

    def __init__(self, directory: Path, dtype: str, longest: int):
        from ed_esurge import SamplingParams, eSurge
        from ed_models.auto import AutoEasyDeLModelForImageTextToText

        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": dtype,
            "config_kwargs": {"scan_layers": False},
        }
        model: Any = AutoEasyDeLModelForImageTextToText.from_pretrained(directory, **options)
        self.engine = eSurge(
            model,
            max_num_seqs=1,
            max_num_seq_buckets=(1,),
            max_model_len=longest,
            max_num_batched_tokens=longest,
            enable_prefix_caching=False,
            silent_mode=True,
        )
        self.params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def __call__(self, ids: np.ndarray, arrays: Arrays) -> int:
        """Return the first token after a prompt."""
        from ed_esurge.model import placed_items

        items = self.engine.loop.runner.items
        assert items is not None, "the model reads images"
        placed = placed_items(items, arrays, ids.tolist(), {IMAGE})
        (out,) = self.engine.generate([ids.tolist()], [self.params], encoder_inputs=[placed])
        return out.outputs[0].token_ids[0]


def save_random(directory: Path, shape: str) -> None:
    """Write a checkpoint of the shape with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    kind, fields = SHAPES[shape]
    config = AutoConfig.for_model(kind, **fields)
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)


def compare_prompts(
    directory: Path, shape: str, images: list[int], dtypes: list[str], rounds: int
) -> None:
    """Compare the tokens, time all numbers of images, and print a table."""
    longest = len(prompt(shape, max(images), 0)[0]) + 8
    made: dict[str, Any] = {}
    for dtype in dtypes:
        made[f"torch {dtype}"] = Torch(directory, dtype)
        made[f"ours {dtype}"] = Ours(directory, dtype, longest)
    header, rows = [f"{shape}, ms"], {key: [key] for key in made}
    for count in images:
        case = prompt(shape, count, 1)
        tokens = {key: of(*case) for key, of in made.items() if "float32" in key}
        if len({*tokens.values()}) > 1:
            raise SystemExit(f"the contenders compute other tokens: {tokens}")
        seeds = {key: iter(range(100, 200)) for key in made}

        def run(key: str, of: Any, count: int = count, seeds: Any = seeds) -> Timed:
            case = prompt(shape, count, next(seeds[key]))
            began = time.perf_counter()
            of(*case)
            return Timed(time.perf_counter() - began)

        runs: dict[str, Run] = {key: partial(run, key, of) for key, of in made.items()}
        turns = all_turns(runs, rounds=rounds)
        medians = {key: statistics.median(seconds) for key, seconds in turns.items()}
        header.append(f"{count} images, {len(case[0])} tokens")
        for key, seconds in medians.items():
            ratio = medians[key.replace("ours", "torch")] / seconds
            shown = f" ({ratio:.2f})" if key.startswith("ours") else ""
            rows[key].append(f"{seconds * 1e3:.0f}{shown}")
        print(header[-1], *(row[-1] for row in rows.values()), file=sys.stderr, flush=True)
    print(f"\n{table(header, [*rows.values()])}")


#: Rule of the trained parameters.
LANGUAGE = (("language_model|lm_head", True),)


def create_batch(shape: str, rows: int, images: int, seed: int) -> dict[str, np.ndarray]:
    """Return a batch as a loader returns it: prompts with images, one in each row."""
    made = [prompt(shape, images, seed * rows + row) for row in range(rows)]
    ids = np.stack([tokens for tokens, _ in made]).astype(np.int32)
    arrays = {name: np.stack([given[name] for _, given in made]) for name in made[0][1]}
    return {"input_ids": ids, **arrays}


class Steps:
    """Steps of a trainer on batches.

    Args:
        shape: name of the model.
        rows: number of rows of a batch.
        keeps: whether the outputs of the encoder are kept.
    """

    def __init__(self, shape: str, rows: int, *, keeps: bool):
        import jax
        import jax.numpy as jnp
        from ed_models.auto import AutoEasyDeLConfig, AutoEasyDeLModelForImageTextToText
        from ed_trainers import SFTArguments, SFTTrainer
        from ed_trainers.optimizers import build_optimizer, build_schedule
        from ed_trainers.state import EasyDeLState
        from ed_trainers.step import build_train_step

        kind, fields = SHAPES[shape]
        config = AutoEasyDeLConfig.for_model(kind, **fields, sharding_axis_dims=(1, 1, 1, 1, 1))
        kinds: Any = AutoEasyDeLModelForImageTextToText
        model = kinds.from_config(config, "float32", "float32", seed=0)
        arguments = SFTArguments(
            total_batch_size=rows,
            max_training_steps=1000,
            learning_rate=1e-4,
            trainable_rules=LANGUAGE,
            image_feature_cache_gib=1 if keeps else None,
        )
        self._trainer: Any = SFTTrainer(arguments, model)
        schedule = build_schedule(arguments, 1000)
        state = EasyDeLState.create(model=model, trainable=LANGUAGE)
        # A step donates its arrays, and the encoder reads those of the model.
        state = jax.tree.map(jnp.copy, state).init_tx(build_optimizer(arguments, schedule))
        self._step = build_train_step(state, self._trainer.method, schedule, rows=rows, seed=0)
        self._leaves = tuple(jax.tree.leaves(state))

    def __call__(self, given: dict[str, np.ndarray]) -> float:
        """Train on a batch, and return the loss."""
        import jax

        prepared = self._trainer.prepare(given)
        stacked = jax.tree.map(lambda x: x[None], prepared)
        placed = self._trainer.placement.place(stacked, stacked=True)
        self._leaves, report = self._step(self._leaves, placed)
        return float(report["loss"])


def time_steps(shape: str, rows: int, images: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of the steps of each row of the table."""
    without, kept = (Steps(shape, rows, keeps=keeps) for keeps in (False, True))
    known, seeds = create_batch(shape, rows, images, 1), iter(range(100, 1000))
    losses = without(known), kept(known)
    if abs(losses[0] - losses[1]) > 1e-4:
        raise SystemExit(f"kept features change the loss of a step: {losses}")

    def timed(of: Steps, new: bool) -> Timed:
        given = create_batch(shape, rows, images, next(seeds)) if new else known
        began = time.perf_counter()
        of(given)
        return Timed(time.perf_counter() - began)

    cases = {"without": (without, False), "kept": (kept, False), "new images": (kept, True)}
    runs: dict[str, Run] = {name: partial(timed, *case) for name, case in cases.items()}
    turns = all_turns(runs, rounds=rounds)
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


def compare_steps(options: argparse.Namespace) -> None:
    """Time the training steps of all shapes, and print a table."""
    header, rows = ["ms"], [["without"], ["kept"], ["new images"]]
    for shape in options.shape:
        medians = time_steps(shape, options.rows, options.images, options.rounds)
        tokens = create_batch(shape, options.rows, options.images, 0)["input_ids"].size
        header.append(f"{shape}, {options.rows * options.images} images, {tokens} tokens")
        for row in rows:
            ratio = medians["without"] / medians[row[0]]
            shown = "" if row[0] == "without" else f" ({ratio:.2f})"
            row.append(f"{medians[row[0]] * 1e3:.0f}{shown}")
    print(f"\n{table(header, rows)}")


def main() -> None:
    parser = command_line("vision", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    prompts, training = kinds.add_parser("prompts"), kinds.add_parser("training")
    for kind in (prompts, training):
        kind.add_argument(
            "--shape", nargs="+", choices=sorted(SHAPES), default=["llava", "qwen2_vl"]
        )
        kind.add_argument("--rounds", type=int, default=5)
    dtypes = ["float32", "bfloat16"]
    prompts.add_argument("--images", type=int, nargs="+", default=[1, 4])
    prompts.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    training.add_argument("--images", type=int, default=1)
    training.add_argument("--rows", type=int, default=1)
    options = parser.parse_args()
    print(machine())
    if options.kind == "training":
        compare_steps(options)
        return
    import torch

    torch.set_num_threads(cores())
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as name:
            save_random(Path(name), shape)
            compare_prompts(Path(name), shape, options.images, options.dtype, options.rounds)


if __name__ == "__main__":
    main()
