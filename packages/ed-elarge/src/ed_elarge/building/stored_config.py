"""Facts of a stored model's configuration on which the data depends."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger

from ed_elarge.config.run_config import RunConfig

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig
    from ed_models.tasks.causal_lm import CausalLM

    from ed_elarge.model import eLargeModel

M = TypeVar("M")

logger = get_logger(__name__)


def count_embedding_rows(run: RunConfig, config: EasyDeLBaseConfig | None = None) -> int | None:
    """Return the number of rows of the embedding of a stored model.

    None for a new or resized model, whose rows follow from the tokenizer, and for a model without
    the field.

    Args:
        run: The run.
        config: Configuration of a model that Python code gives; None reads the stored one.
    """
    from ed_models.checkpoints import hub

    section = run.model
    if section is None or section.config is not None or section.name_or_path is None:
        return None
    if section.resize_token_embeddings:
        return None
    if config is None:
        with run.blame("model", "name_or_path"):
            revision = section.extra_kwargs.revision
            config = hub.read_config(hub.resolve(str(section.name_or_path), revision=revision))
    rows = getattr(config.get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def resize_tokens(elm: eLargeModel, model: M) -> M:
    """Return a model with the rows of `model.resize_token_embeddings`; rows are never removed.

    Raises:
        InputError: the number of rows is less than the number of ids of the tokenizer.
    """
    from ed_data.tokens.tokenizers import count_ids
    from ed_models.adapters.token_rows import count_token_rows

    run = elm.config
    rows = None if run.model is None else run.model.resize_token_embeddings
    if not rows:
        return model
    module = cast("CausalLM", model)
    with run.blame("model", "resize_token_embeddings"):
        tokens = elm.build_tokenizer()
        if tokens is None:
            raise ConfigError("the model reads no text, and has no rows of tokens: omit the key")
        present, ids = count_token_rows(module.config), count_ids(tokens)
        if rows is not True and not max(ids, present) <= rows:
            raise ConfigError(
                f"{rows} rows are too few: the tokenizer has ids up to {ids - 1}, and the model "
                f"has {present} rows: set at least {max(ids, present)}, or true"
            )
        size = max(ids, present) if rows is True else rows
        return cast(M, module.resize_token_embeddings(size))


def get_sequence_length(run: RunConfig, config: EasyDeLBaseConfig | None = None) -> int | None:
    """Return the tokens of one sequence; log a default, which the model's positions limit.

    Args:
        run: The run.
        config: Configuration of a model that Python code gives; None reads the stored one.
    """
    length, key = run.sequence_length
    if key or length is None or run.trainer is None:
        return length
    model = run.model
    if model is None:
        return length
    if run.known_positions is None and model.config is None:
        from ed_models import AutoEasyDeLConfig

        if config is None:
            with run.blame("model"):
                name, revision = str(model.name_or_path), model.extra_kwargs.revision
                config = AutoEasyDeLConfig.from_pretrained(name, revision=revision)
        text = getattr(config, "text_config", None) or config
        length = run.trainer.default_length(getattr(text, "max_position_embeddings", None))
    logger.info("sequences have %d tokens, the default of %s: set max_length", length, run.method)
    return length
