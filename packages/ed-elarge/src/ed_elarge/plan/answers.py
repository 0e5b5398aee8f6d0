"""The child process of a plan: `python -m ed_elarge.plan.answers` reads a request from its input.

See `ed_elarge.plan.child`. The process compiles programs for simulated CPU devices and executes
none of them, so no array of the model exists.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.errors import Document

ShapeRequest = Mapping[str, Any]


def shapes(run: RunConfig, request: ShapeRequest) -> dict[str, Any]:
    """Return the tensors of the model class, with the number of layers of each."""
    import math

    from ed_layers.cache.spec import LayerCacheSpec

    from ed_elarge.plan.abstract import abstract_model, find_stored_codes, tensors

    model = abstract_model(run, request["vocab"], is_base=True)
    stored_codes = find_stored_codes(run, request["vocab"])
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in tensors(model):
        dtype = "" if one["dtype"] == str(model.param_dtype) else one["dtype"]
        for full_name in one["names"]:  # the layers of a stack can have different codes
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", full_name)
            codes = stored_codes.get(full_name)
            row = {"name": name, "shape": one["shape"], "axes": one["axes"], "dtype": dtype}
            key = (name, tuple(one["shape"]), dtype, codes)
            merged.setdefault(key, {**row, "codes": codes, "layers": 0})["layers"] += 1
    caches, states = [], []
    for specs in model.cache_specs():
        for spec in specs if isinstance(specs, tuple) else (specs,):
            if isinstance(spec, LayerCacheSpec):
                width = 0 if spec.values_in_keys else spec.values
                caches.append([spec.num_kv_heads, spec.head_dim, width, spec.window])
                continue
            for state in spec.states:
                stored = "" if state.dtype == str(model.dtype) else state.dtype
                states.append([math.prod(state.shape), stored])
    text = model.config.get_text_config()
    fields = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "intermediate_size",
        "num_experts_per_tok",
        "max_position_embeddings",
        "no_rope_layers",
        "no_rope_layer_interval",
    )
    config = {name: getattr(text, name, None) for name in fields}
    tensor_rows = [*merged.values()]
    return {"tensors": tensor_rows, "caches": caches, "states": states, "config": config}


def answer_train(run: RunConfig, request: ShapeRequest) -> dict[str, Any]:
    """Compile the train step, and return the bytes of its arguments and temporary buffers."""
    from ed_elarge.plan.abstract import abstract_model, lowered_train_step
    from ed_elarge.plan.programs import describe_devices, read_memory

    model = abstract_model(run, request["vocab"], describe_devices(request))
    compiled = lowered_train_step(run, model, request["length"]).compile()
    return read_memory(compiled.memory_analysis(), tpu=bool(request.get("topology")))


def answer_programs(run: RunConfig, request: ShapeRequest) -> dict[str, Any]:
    """Compile steps for described devices; see `ed_elarge.plan.programs.compile_steps`."""
    from ed_elarge.plan.programs import compile_steps

    return {"programs": compile_steps(run, request)}


SHAPE_ANSWERS: dict[str, Callable[[RunConfig, ShapeRequest], dict[str, Any]]] = {
    "shapes": shapes,
    "train": answer_train,
    "programs": answer_programs,
}


def _main() -> None:
    """Answer the request on the standard input."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    request = json.load(sys.stdin)
    sys.path += request.get("packages", ())  # a plugin of jax in another environment
    run = normalize(Document(request["name"], value=request["run"]))
    answer = SHAPE_ANSWERS[request["question"]](run, request)
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
