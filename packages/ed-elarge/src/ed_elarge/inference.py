"""Completing prompts and serving, over the engine of an `eLargeModel`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ed_elarge.checks import has_held_out

if TYPE_CHECKING:
    from ed_elarge.action_options import GenerateOptions, ServeOptions
    from ed_elarge.model import eLargeModel

PROMPT_WORDS = 12


def complete(elm: eLargeModel, options: GenerateOptions) -> list[tuple[str, str]]:
    """Complete each prompt: `[(prompt, completion), ...]`."""
    from ed_esurge.sampling import SamplingParams

    given = options.prompts
    prompts = [given] if isinstance(given, str) else list(given or [default_prompt(elm)])
    params = SamplingParams(
        max_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    outputs = elm.build_esurge().generate(prompts, params)
    return [(p, out.outputs[0].text) for p, out in zip(prompts, outputs, strict=True)]


def default_prompt(elm: eLargeModel) -> str:
    """The first words of the longest held-out text, so that the model has not seen them."""
    texts = elm.held_out_texts() if has_held_out(elm.config.mixture) else []
    longest = max(texts, key=len, default="The")
    words = [match.end() for match in re.finditer(r"\S+", longest)]
    return longest[: words[min(len(words), PROMPT_WORDS) - 1]]


def serve(elm: eLargeModel, options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from ed_esurge.server import serve as run_server

    run_server(
        elm.build_esurge(),
        options.host,
        options.port,
        served_model_name=options.served_model_name or model_name(elm),
        api_key=options.api_key,
        cors_origins=options.cors_origins,
        log_level=options.log_level,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
    )


def model_name(elm: eLargeModel) -> str:
    """What clients call the model unless told otherwise."""
    run = elm.config
    if run.model is not None and run.model.name_or_path is not None:
        return Path(run.model.name_or_path).name
    return Path(run.trainer.save_directory).name if run.trainer is not None else "model"
