"""Compare the time of `elarge plan`, a lower bound, with the published speed of MaxText on TPUs.

    python -m tools.bench.plan_times

The sources are two tables of MaxText's documentation: "Optimized models tiering", version 0.2.0
(https://maxtext.readthedocs.io/en/maxtext-v0.2.0/reference/models/tiering.html), with tokens per
second and device on v6e and v5p, and the expected performance of `MaxText/configs/v5e`, with the
share of the peak (MFU). The batches are those of MaxText's benchmark configurations
where they exist, otherwise four sequences on a device. All steps recompute their layers
(`nothing_saveable`); some of the published runs recompute less.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.plan.devices import Hardware, named
from ed_elarge.plan.estimate import plan
from ed_elarge.plan.timing import Time

from tools.bench.measure import table


class Published(NamedTuple):
    """A published run.

    Attributes:
        model, device, count: the model, and the devices.
        length, rows: tokens of a sequence, and sequences of a device.
        speed: tokens per second and device, or the share of the peak (below 1).
        tp: size of the axis `tp`; the other devices are those of `fsdp`.
    """

    model: str
    device: str
    count: int
    length: int
    rows: int
    speed: float
    tp: int = 1


def _llama(
    hidden: int, inner: int, layers: int, heads: int, vocab: int, kv_heads: int = 8
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


def _mixtral(hidden: int, inner: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    return {**_llama(hidden, inner, layers, heads, vocab), **experts}


MODELS = {
    "Llama 2 70B": _llama(8192, 28672, 80, 64, 32000),
    "Llama 3.1 8B": _llama(4096, 14336, 32, 32, 128256),
    "Llama 3.1 70B": _llama(8192, 28672, 80, 64, 128256),
    "Llama 3.1 405B": _llama(16384, 53248, 126, 128, 128256),
    "Mixtral 8x7B": _mixtral(4096, 14336, 32, 32, 32000),
    "Mixtral 8x22B": _mixtral(6144, 16384, 56, 48, 32768),
    # MaxText's default model with `global_parameter_scale` 16, 32, 64 and 128.
    "MaxText 16B": _llama(4096, 14336, 64, 32, 32000, 32),
    "MaxText 32B": _llama(8192, 28672, 32, 64, 32000, 64),
    "MaxText 64B": _llama(8192, 28672, 64, 64, 32000, 64),
    "MaxText 128B": _llama(8192, 28672, 128, 64, 32000, 64),
}
SPEEDS = (
    Published("Llama 2 70B", "v6e", 256, 4096, 4, 900),
    Published("Llama 3.1 8B", "v6e", 256, 8192, 4, 7207),
    Published("Llama 3.1 70B", "v6e", 256, 8192, 4, 960),
    Published("Llama 3.1 405B", "v6e", 256, 8192, 1, 123),
    Published("Mixtral 8x7B", "v6e", 256, 4096, 4, 3899),
    Published("Mixtral 8x22B", "v6e", 256, 4096, 4, 1326),
    Published("Llama 2 70B", "v5p", 512, 4096, 4, 692),
    Published("Mixtral 8x7B", "v5p", 256, 4096, 4, 2909),
    Published("MaxText 16B", "v5e", 256, 2048, 6, 0.611),
    Published("MaxText 32B", "v5e", 256, 2048, 4, 0.6686),
    Published("MaxText 64B", "v5e", 256, 2048, 2, 0.599),
    Published("MaxText 128B", "v5e", 256, 2048, 1, 0.5606, tp=16),
)


def bound(one: Published) -> Time:
    """Return the bound of a run's step."""
    values = {
        "model": {
            "config": {**MODELS[one.model], "max_position_embeddings": 131072},
            "tokenizer": "tokenizer",
        },
        "loader": {"dtype": "bf16", "param_dtype": "bf16"},
        "sharding": {"axis_dims": [1, -1, 1, one.tp, 1]},
        "base_config": {"values": {"gradient_checkpointing": "nothing_saveable"}},
        "mixture": {
            "informs": [{"type": "json", "data_files": "rows.jsonl"}],
            "pack_tokens": True,
            "pack_seq_length": one.length,
        },
        "trainer": {
            "trainer_type": "sft",
            "total_batch_size": one.rows * one.count,
            "max_training_steps": 2,
        },
        "actions": ["train"],
    }
    run = normalize(Document("plan.yaml", value=values))
    made = plan(run, Hardware(named(one.device), (one.count,))).training
    assert made is not None, "the run trains"
    return made.time


def share(one: Published) -> float:
    """Return the published speed relative to the bound."""
    time = bound(one)
    return one.speed / (time.mfu if one.speed < 1 else time.tokens_per_second / one.count)


def errors(shares: list[float]) -> list[float]:
    """Return the errors of the time of each run, predicted by the median share of the others."""
    found = []
    for i, own in enumerate(shares):
        others = shares[:i] + shares[i + 1 :]
        found.append(abs(own / statistics.median(others) - 1))
    return sorted(found)


def main() -> None:
    """Print the bounds and the published speeds."""
    rows = []
    of_device: dict[str, list[float]] = {}
    for one in SPEEDS:
        own = share(one)
        of_device.setdefault(one.device, []).append(own)
        time = bound(one)
        rows.append([f"{one.model}, {one.count} {one.device}", time.bound, f"{own:.0%}"])
    print(table(["run", "bound by", "published speed, share of the bound"], rows))
    for device, shares in of_device.items():
        print(f"{device}: median share {statistics.median(shares):.0%}")
    found = sorted(error for shares in of_device.values() for error in errors(shares))
    print(
        f"with the median share of the device's other runs: median error of the time "
        f"{statistics.median(found):.0%}, largest {found[-1]:.0%}, {len(found)} runs"
    )


if __name__ == "__main__":
    main()
