"""Compare the prefill of prompts with images with transformers on torch, in one run.

    uv run python -m tools.bench.vision_prefill
    uv run python -m tools.bench.vision_prefill --shape tiny --images 1 --rounds 1     a trial

On a GPU, `JAX_DEFAULT_MATMUL_PRECISION=highest` makes both contenders compute float32 products in
float32; jax would use TF32.

Both contenders load one checkpoint with random weights, and compute the first token after a prompt
with images and 64 tokens of text: the vision tower, the projector and the language model with its
keys and values. Ours is the engine (`eSurge.generate` with one token), without prefix cache. Each
round has other images, so no encoder output is reused. Torch runs the model with a cache and the
head of the last position.

The float32 tokens are compared first. A cell contains the median in milliseconds, and the ratio to
torch in the same number format; above 1 = faster than torch.
"""

from __future__ import annotations

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
        from ed_esurge.encoder_items import placed_items

        items = self.engine.loop.runner.items
        assert items is not None, "the model reads images"
        placed = placed_items(items, arrays, ids.tolist(), IMAGE)
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


def main() -> None:
    parser = command_line("vision_prefill", __doc__)
    add = parser.add_argument
    add("--shape", nargs="+", choices=sorted(SHAPES), default=["llava", "qwen2_vl"])
    add("--images", type=int, nargs="+", default=[1, 4])
    add("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    add("--rounds", type=int, default=5)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(cores())
    print(machine())
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as name:
            save_random(Path(name), shape)
            measure(Path(name), shape, options.images, options.dtype, options.rounds)


def measure(directory: Path, shape: str, images: list[int], dtypes: list[str], rounds: int) -> None:
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


if __name__ == "__main__":
    main()
