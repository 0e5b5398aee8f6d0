"""Embeddings, scores of pairs of texts, and answers, computed by the serving engine.

Embedded texts are tokenized as in sentence-transformers: with the prompt of their role, and
truncated to the maximum length of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from ed_infra.chats import Prompt
from ed_infra.errors import ConfigError, EasyDeLError

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge
    from ed_esurge.sampling import PoolingParams

#: The role of a text, which selects the prompt. None: the default prompt of the checkpoint.
TextRole = Literal["query", "document"] | None
_DOCUMENTS = ("document", "passage", "corpus")


class TextModel:
    """An embedding model, a cross-encoder or a model that generates text in an engine.

    Args:
        engine: The engine with a tokenizer.
        batch_size: Texts that the engine receives at a time.
        use_tqdm: Whether to show progress bars.
    """

    def __init__(self, engine: eSurge, *, batch_size: int = 512, use_tqdm: bool = False) -> None:
        if engine.tokenizer is None:
            raise ConfigError("an evaluation of texts needs a tokenizer: set model.tokenizer")
        self._engine, self._size, self._bar = engine, batch_size, use_tqdm
        self._tokenizer: Any = engine.tokenizer
        self._settings = engine.embedding_settings
        longest = self._settings.max_seq_length if self._settings is not None else None
        self._limit = min(engine.max_model_len, longest or engine.max_model_len)

    @property
    def embeds(self) -> bool:
        """Whether the model returns an embedding of a text."""
        return self._settings is not None

    @property
    def scores_pairs(self) -> bool:
        """Whether the model returns one score for a pair of texts."""
        labels = self._engine.labels
        return labels is not None and len(labels.names) == 1

    @property
    def similarity(self) -> str:
        """Name of the function that compares two embeddings."""
        return "cosine" if self._settings is None else self._settings.similarity_fn_name

    def check_embeds(self, kind: str) -> None:
        """Raise an error if the model returns no embeddings.

        Raises:
            ConfigError: The model is a classifier.
        """
        if not self.embeds:
            raise ConfigError(
                f"a {kind} task compares embeddings, and {self._engine.model_name} returns none: "
                "set model.task: embedding, or evaluate a reranking task"
            )

    def check_generates(self, kind: str) -> None:
        """Raise an error if the model generates no text.

        Raises:
            ConfigError: The model returns embeddings or scores.
        """
        if self.embeds or self._engine.labels is not None:
            raise ConfigError(
                f"a task of the type {kind} needs answers, and {self._engine.model_name} "
                "generates no text: evaluate another type of task"
            )

    def embed(self, texts: Sequence[str], role: TextRole = None) -> np.ndarray:
        """Return the embeddings of texts, float32 [n, d]."""
        parts = [self._embed_batch(part, role) for part in self._parts(texts)]
        return np.concatenate(parts) if parts else np.zeros((0, 1), np.float32)

    def score(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Return the score of each pair of texts before its activation, float64 [n]."""
        scores = [self._score_batch(part) for part in self._parts(pairs)]
        return np.concatenate(scores) if scores else np.zeros(0)

    def complete(self, prompts: Sequence[Prompt], most_tokens: int) -> list[str]:
        """Return the greedy answer to each prompt, a text or a conversation.

        Raises:
            ConfigError: A prompt does not fit, or a prompt is a conversation and the tokenizer has
                no chat template.
        """
        from ed_esurge.sampling import SamplingParams
        from ed_esurge.template import ChatTemplate

        params = SamplingParams(max_tokens=most_tokens, temperature=0.0)
        answers: list[str] = []
        for part in self._parts(prompts):
            ready = [
                prompt
                if isinstance(prompt, str)
                else ChatTemplate(self._tokenizer).token_ids(prompt)
                for prompt in part
            ]
            outputs = self._engine.generate(ready, params, use_tqdm=self._bar)
            answers += [output.outputs[0].text for output in outputs]
        return answers

    def _parts(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        for start in range(0, len(items), self._size):
            yield items[start : start + self._size]

    def _embed_batch(self, texts: Sequence[str], role: TextRole) -> np.ndarray:
        from ed_esurge.sampling import PoolingParams

        settings = self._settings
        assert settings is not None, "the tasks check that the model embeds"
        prompt = self._prompt(role)
        params = PoolingParams(normalize=False)
        if prompt and not settings.include_prompt:
            params = params.replace(prompt_length=self._prompt_tokens(prompt))
        prompted_texts = [prompt + text for text in texts]
        if settings.do_lower_case:
            prompted_texts = [text.lower() for text in prompted_texts]
        tokens = self._tokenizer(prompted_texts, truncation=True, max_length=self._limit)[
            "input_ids"
        ]
        return self._embed_tokens([list(map(int, row)) for row in tokens], params)

    def _prompt(self, role: TextRole) -> str:
        settings = self._settings
        assert settings is not None
        if role is None:
            return settings.prompt()
        names = _DOCUMENTS if role == "document" else ("query",)
        stored = settings.prompts
        return next((stored[name] for name in names if stored.get(name)), "") or settings.prompt()

    def _prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt at the start of a text."""
        tokens = self._tokenizer(prompt)["input_ids"]
        last = (self._tokenizer.sep_token_id, self._tokenizer.eos_token_id)
        return len(tokens) - (1 if tokens and tokens[-1] in last else 0)

    def _score_batch(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        from ed_esurge.sampling import PoolingParams

        first, second = map(list, zip(*pairs, strict=True))
        encoded = self._tokenizer(first, second, truncation="longest_first", max_length=self._limit)
        types = encoded.get("token_type_ids") or [[]] * len(pairs)
        starts = [next((i for i, kind in enumerate(row) if kind), None) for row in types]
        params = [PoolingParams(normalize=False, second_text_start=start) for start in starts]
        tokens = [list(map(int, row)) for row in encoded["input_ids"]]
        return self._embed_tokens(tokens, params)[:, 0].astype(np.float64)

    def _embed_tokens(
        self, tokens: list[list[int]], params: PoolingParams | list[PoolingParams]
    ) -> np.ndarray:
        vectors = []
        for output in self._engine.embed(tokens, params, use_tqdm=self._bar):
            if output.pooled is None:
                raise EasyDeLError(f"the engine returned no vector: {output.error}")
            vectors.append(np.asarray(output.pooled, np.float32))
        return np.stack(vectors)
