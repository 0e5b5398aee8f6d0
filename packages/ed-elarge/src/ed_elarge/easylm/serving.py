"""`python -m EasyLM.models.llama.llama_serve`: a server for a model of EasyLM."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ed_elarge.easylm import training
from ed_elarge.easylm.flags import FlagValues, need


def serve_llama(flags: FlagValues) -> None:
    """Serve the model of `load_checkpoint` until SIGTERM or Ctrl-C."""
    from ed_infra import distributed

    from ed_elarge.model import eLargeModel

    need(flags, "load_checkpoint")
    if flags["initialize_jax_distributed"]:
        distributed.initialize()
    with tempfile.TemporaryDirectory(prefix="easylm-") as folder:
        eLargeModel(build_sections(flags, Path(folder))).serve(
            host=flags["lm_server.host"],
            port=flags["lm_server.port"],
            served_model_name=flags["lm_server.name"],
            log_level="info" if flags["lm_server.logging"] else "warning",
        )


def build_sections(flags: FlagValues, folder: Path) -> dict[str, Any]:
    """Return the sections of a run file that serves the model."""
    model = training.load_model(flags, folder / training.LOADED)
    tokenizer = training.get_tokenizer_name(flags)
    if tokenizer is not None:
        model["tokenizer"] = tokenizer
    return {
        "model": model,
        "loader": {"dtype": flags["dtype"], "param_dtype": flags["dtype"]},
        "sharding": {"axis_dims": training.parse_mesh(flags["mesh_dim"])},
        "esurge": {
            "max_model_len": flags["seq_length"],
            "max_num_seqs": max(flags["lm_server.batch_size"], 1),
        },
    }
