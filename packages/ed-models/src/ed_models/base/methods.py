"""The methods of every model for generation and files.

Each method imports its implementation when it is called. The import of a family therefore loads
only the body, the head and the configuration.

Legend: b rows, s prompt length, r rows of the output, n new tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError

from ed_models.weights.blocks import Shapes

if TYPE_CHECKING:
    import numpy as np
    from ed_infra.inputs import Encoded, Inputs
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int
    from transformers import GenerationConfig, PreTrainedModel

    from ed_models.checkpoints.carried import CarriedTensors
    from ed_models.checkpoints.saving import TokenizerFiles
    from ed_models.generation.generate import GenerateOutput
    from ed_models.generation.prompts import TokenRows
    from ed_models.generation.stop_strings import TokenDecoder
    from ed_models.protocol import LanguageModel


class EasyGenerationMixin:
    """A mixin that adds `generate` to a `LanguageModel`."""

    config: EasyDeLBaseConfig
    generation_json: str | None = None
    #: Names of the arrays that `__call__` accepts from a batch.
    input_names: tuple[str, ...] = ("input_ids", "attention_mask", "segment_ids", "position_ids")

    def generate(
        self,
        input_ids: TokenRows | None = None,
        generation_config: GenerationConfig | Mapping[str, object] | None = None,
        *,
        attention_mask: TokenRows | None = None,
        inputs: Mapping[str, Any] | None = None,
        seed: int = 0,
        tokenizer: TokenDecoder | None = None,
        assistant_model: LanguageModel | None = None,
        logits_processor: Callable[..., jax.Array] | Sequence[Callable[..., jax.Array]] = (),
        **options: object,
    ) -> GenerateOutput:
        """Generate a continuation of each row.

        Args:
            input_ids: token ids [b, s]; shorter rows are padded on the left. For an
                encoder-decoder, the tokens of the encoder, padded on either side. A model for
                speech reads `input_features` or `input_values` instead.
            generation_config: a `transformers.GenerationConfig`, or a mapping with its names;
                arguments of this call override it. The checkpoint's generation_config.json
                supplies only the special tokens, not the sampling options.
            attention_mask: [b, s], 1 for a token, 0 for padding. By default, padding tokens at the
                start of a row are masked if the padding token is known and is not an
                end-of-sequence token.
            inputs: further arrays of the prompts by name, such as `pixel_values`; the model
                reads them once. Arrays named in `input_names` can also be passed as arguments.
                `encoder_outputs` [b, t, d] replaces the inputs of an encoder.
            seed: 0 to 2**32 - 1; each draw depends on the seed, the row index and the position.
            tokenizer: tokenizer for `stop_strings`; any object with `decode(ids) -> str`.
            assistant_model: a smaller model with the same vocabulary, which drafts
                `num_assistant_tokens` per step; the output equals that of plain decoding.
            logits_processor: functions `(input_ids, scores) -> scores` of jax arrays, traced into
                the loop after the other processors and before temperature and filters. `input_ids`
                [r, t] are right-aligned, -1 to the left of a row's first token; `scores` [r, v].
                Each function compiles a separate program: reuse the same function object.
            options: options of a GenerationConfig, by name (docs/models.md lists them), and
                `presence_penalty`, `frequency_penalty`, `output_logprobs`, `logprobs_mode`. The
                default is greedy decoding of up to 128 new tokens until an end-of-sequence token.
                `eos_token_id=None` disables the end-of-sequence token.

        Raises:
            ConfigError: a prompt has a token id outside of the vocabulary, an option is unknown,
                out of range or without effect, or the model has too few positions for the result.
        """
        from ed_models.generation.generate import generate

        return generate(
            cast("LanguageModel", self),
            input_ids,
            generation_config,
            attention_mask=attention_mask,
            inputs=inputs,
            seed=seed,
            tokenizer=tokenizer,
            assistant_model=assistant_model,
            options=options | {"logits_processor": logits_processor or None},
            checkpoint=self.generation_json,
        )

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the embeddings of images, or of the tokens of an encoder.

        Args:
            inputs: the arrays that the encoder reads.
            key: dropout key; None = deterministic.

        Raises:
            ConfigError: the model has no encoder.
        """
        raise ConfigError(f"{type(self).__name__} has no encoder: call the model with input_ids")

    def batched_inputs(self, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays of prompts in the form that `__call__` accepts, a row for each prompt.

        Args:
            input_ids: token ids, [b, s].
            arrays: further arrays by name.
        """
        return arrays

    def decode(self, input_ids: Int[jax.Array, "b s"], **inputs: Any) -> Any:
        """Run the language model on tokens; the arguments are those of `__call__`.

        The decoder of an encoder-decoder also accepts `encoded`, the output of `encode`.
        """
        return cast(Callable[..., Any], self)(input_ids, **inputs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Int[jax.Array, "b s"],
        max_length: int,
        pad_token_id: int | None = None,
        *,
        attention_mask: Int[jax.Array, "b s"] | None = None,
        inputs: Inputs | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of `decode` for the prompt: mask, positions, empty cache, further
        arrays. With further arrays, the model computes the positions.

        Args:
            input_ids: token ids of the prompts, [b, s].
            max_length: maximum number of tokens per row, including the prompt.
            pad_token_id: the padding token, used when `attention_mask` is None.
            attention_mask: 1 for a token, 0 for padding, [b, s].
            inputs: further arrays of the prompts; for an encoder-decoder, those of the encoder.
        """
        from ed_models.generation.prompts import decoder_arguments

        return decoder_arguments(
            cast("LanguageModel", self), input_ids, max_length, pad_token_id, attention_mask, inputs
        )

    def compute_transition_scores(
        self,
        sequences: Int[np.ndarray, "r t"],
        scores: Float[np.ndarray, "n m v"],
        beam_indices: Int[np.ndarray, "r n"] | None = None,
        normalize_logits: bool = False,
    ) -> Float[np.ndarray, "r n"]:
        """Return the score of each new token from the scores of `output_scores`.

        Args:
            sequences, scores, beam_indices: attributes of the `GenerateOutput`.
            normalize_logits: whether to convert scores to log-probabilities first.

        Returns:
            Scores [r, n]; 0 after the end of a beam.
        """
        from ed_models.generation.generate import transition_scores

        return transition_scores(sequences, scores, beam_indices, normalize_logits)


class EasyBridgeMixin:
    """`from_pretrained`, `save_pretrained` and `push_to_hub` for a module with a config."""

    config: EasyDeLBaseConfig
    #: Name of the class in config.json; None = the name of the Python class.
    architecture: ClassVar[str | None] = None
    # Text of the checkpoint's generation_config.json: kept for saving, read for special tokens.
    generation_json: str | None = None
    #: Parts of the checkpoint that the model does not compute; saving copies them.
    carried_tensors: CarriedTensors | None = None

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> Self:
        """Load this class from a directory or a hub repository.

        `ed_models.checkpoints.hub.from_pretrained` lists the options and errors.
        """
        from ed_models.checkpoints import hub

        return hub.from_pretrained(name_or_path, cls, **options)

    @classmethod
    def read_settings(
        cls, directory: Path, *, allow_pickle: bool = False, check_finite: bool = True
    ) -> dict[str, object]:
        """Return attributes that come from files other than config.json and the weights.

        Args:
            directory: the directory of the checkpoint.
            allow_pickle, check_finite: see `from_pretrained`, for weights outside of the weight
                files of the model.
        """
        from ed_models.generation.options import read_generation_settings

        return {"generation_json": read_generation_settings(directory)}

    @classmethod
    def new_tensors(cls, config: EasyDeLBaseConfig, missing: Shapes) -> Mapping[str, np.ndarray]:
        """Return values for tensors that a checkpoint of another task lacks; default: none.

        Args:
            config: configuration of the checkpoint; `architectures` names the saved class.
            missing: shapes of the tensors that the checkpoint lacks.
        """
        return {}

    def write_settings(self, directory: Path) -> None:
        """Write the files other than config.json and the weights."""
        from ed_models.generation.options import write_generation_settings

        write_generation_settings(directory, self.generation_json, self.config)

    def separate_tensors(self) -> Mapping[str, Mapping[str, jax.Array]]:
        """Return folder -> name -> array of the weights in further files; default: none."""
        return {}

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        tokenizer: TokenizerFiles | None = None,
        max_shard_size: int | str = "5GB",
        dtype: DTypeLike | None = None,
        whole: bool = True,
    ) -> None:
        """Write config, weights, generation settings and tokenizer in the layout of `transformers`.

        The other parts of the checkpoint that the model was loaded from are copied: towers of a
        multimodal model whose language model was loaded, layers that predict further tokens,
        files of processors, custom classes and licenses. `whole=False` writes the model alone.

        Quantized matrices are written as codes and scales, under names that `from_pretrained` reads
        (`ed_models.checkpoints.quantized_tensors`). Call `dequantize` first to write a model that
        `transformers` reads. A model with adapters writes only the adapters, in PEFT's layout
        (float32, one file). Merge the adapters (`unwrap_lora_to_layers`) to write a model. See
        `ed_models.checkpoints.saving.save_model` for the arguments. Without `tokenizer`, the
        tokenizer and the processor of the checkpoint that the model was loaded from are copied,
        unless the directory has a tokenizer.

        Raises:
            ConfigError: `dtype` is set and the model has adapters.
            CheckpointError: a file of the checkpoint is absent or has changed since loading.
        """
        from ed_models.base.export import save_pretrained

        save_pretrained(
            self,
            save_directory,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
            dtype=dtype,
            whole=whole,
        )

    def save_gguf(
        self,
        path: str | Path,
        *,
        tokenizer: TokenizerFiles | str | Path | None = None,
        dtype: str | None = None,
    ) -> Path:
        """Write the model as a GGUF file for llama.cpp, with its tokenizer and chat template.

        See `ed_models.base.gguf_export.save_gguf`.

        Raises:
            CheckpointError: llama.cpp has no such model.
            ConfigError: the model has adapters or quantized matrices, or the format is unknown.
        """
        from ed_models.base.gguf_export import save_gguf

        return save_gguf(self, path, tokenizer=tokenizer, dtype=dtype)

    def to_torch(self) -> PreTrainedModel:
        """Return the model as a `transformers` class on torch's CPU, with the same dtypes.

        Raises:
            ConfigError: torch is not installed, `transformers` has no such model, or the model has
                adapters or is quantized.
        """
        from ed_models.base.export import to_torch

        return to_torch(self)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: TokenizerFiles | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
        max_shard_size: int | str = "5GB",
        dtype: DTypeLike | None = None,
    ) -> str:
        """Upload to a hub repository, created if it does not exist; return the commit's URL."""
        from ed_models.base.export import push_to_hub

        return push_to_hub(
            self,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            tokenizer=tokenizer,
            max_shard_size=max_shard_size,
            dtype=dtype,
        )
