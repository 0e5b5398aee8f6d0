"""Facts of a stored model's configuration on which the data depends."""

from __future__ import annotations

from typing import Any

from ed_infra.logging import get_logger

from ed_elarge.config.run_config import RunConfig

logger = get_logger(__name__)


def count_embedding_rows(run: RunConfig) -> int | None:
    """Return the number of rows of the embedding of a stored model.

    None for a new model, whose rows follow from the tokenizer, and for a model without the field.
    """
    from ed_models.checkpoints import hub

    section = run.model
    if section is None or section.config is not None or section.name_or_path is None:
        return None
    with run.blame("model", "name_or_path"):
        revision = section.extra_kwargs.revision
        config: Any = hub.read_config(hub.resolve(str(section.name_or_path), revision=revision))
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def sequence_length(run: RunConfig) -> int | None:
    """Return the tokens of one sequence; log a default, which the model's positions limit."""
    length, key = run.sequence_length
    if key or length is None or run.trainer is None:
        return length
    model = run.model
    if model is None:
        return length
    if run.known_positions is None and model.config is None:
        from ed_models import AutoEasyDeLConfig

        with run.blame("model"):
            name, revision = str(model.name_or_path), model.extra_kwargs.revision
            config: Any = AutoEasyDeLConfig.from_pretrained(name, revision=revision)
        text = getattr(config, "text_config", None) or config
        length = run.trainer.default_length(getattr(text, "max_position_embeddings", None))
    logger.info("sequences have %d tokens, the default of %s: set max_length", length, run.method)
    return length
