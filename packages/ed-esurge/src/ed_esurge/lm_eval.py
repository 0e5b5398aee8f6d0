"""lm-evaluation-harness over the engine: `lm_eval.simple_evaluate(model=eSurgeLM(engine), ...)`.

Scores follow the Hugging Face backend of lm-eval in every detail: the boundary between context and
continuation, special tokens, the prefix of an empty context, disjoint windows of rolling
likelihoods. A different score therefore indicates a difference of the models, not of this adapter.

Tasks with `doc_to_image` need an engine whose model reads images. The text of a document contains
`<image>` once for each image.

Requires the extra `ed-esurge[lm-eval]`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ed_infra.errors import ConfigError, did_you_mean
from tqdm import tqdm

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "ed_esurge.lm_eval needs lm-evaluation-harness: install ed-esurge[lm-eval]"
    ) from error

from ed_esurge.lm_eval_images import TaskImages
from ed_esurge.sampling import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from ed_esurge.core.commands import EncoderInput
    from ed_esurge.engine import eSurge

# arguments of the request as cache key, context tokens, continuation tokens
Scored = tuple[tuple[Any, ...] | None, list[int], list[int]]

# Hugging Face generation keywords of tasks that do not affect the engine's output.
_IGNORED = frozenset({"do_sample", "use_cache", "pad_token_id", "cache_implementation"})


class eSurgeLM(TemplateLM):
    """A language model of lm-evaluation-harness.

    Args:
        engine: an `eSurge` with a tokenizer.
        max_gen_toks: default number of tokens to generate.
        add_bos_token: whether texts begin with the tokenizer's special tokens; None uses the
            default of the tokenizer, as the Hugging Face backend does.
        prefix_token_id: token that replaces an empty context; None: BOS, else EOS.
        batch_size: number of requests per call of the engine. It limits host memory and sets the
            granularity of the progress bar, and does not affect the results. None: four times
            `max_num_seqs`.

    Raises:
        ConfigError: the engine has no tokenizer, or the tokenizer has neither BOS nor EOS.
    """

    def __init__(
        self,
        engine: eSurge,
        *,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if engine.tokenizer is None:
            raise ConfigError("lm-eval sends text: build the engine with a tokenizer")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.batch_size = batch_size or 4 * engine.config.max_num_seqs
        candidates = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        prefix = next((token for token in candidates if token is not None), None)
        if prefix is None:
            raise ConfigError(
                "the tokenizer has neither a BOS nor an EOS token to represent an empty context: "
                "give prefix_token_id"
            )
        self._prefix_token_id = prefix
        self._images = TaskImages.of(engine)

    # ---- properties of the model

    @property
    def MULTIMODAL(self) -> bool:
        """Whether the model reads the images of tasks; the name is that of lm-eval."""
        return self._images is not None

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context."""
        return self._prefix_token_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens before a scored token: `max_model_len - 2`.

        One token is subtracted because the engine's prompt includes the scored token. A second one
        is subtracted because published results use the rolling windows of engines that need room
        for a generated token.
        """
        return self.engine.max_model_len - 2

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the cache keys of the harness."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    # ---- text and tokens

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the token ids of a text. Special tokens are added as requested, but not twice."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            prefix = self.tokenizer.decode([self.prefix_token_id])
            if prefix and string.startswith(prefix):
                add_special_tokens = False
        if add_special_tokens is None:
            add_special_tokens = True
        return self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the chat template of the tokenizer.

        Raises:
            ConfigError: the tokenizer has no template.
        """
        renders = self.tokenizer
        if self._images is not None:
            chat_history = self._images.chat(chat_history)
            if not renders.chat_template:
                renders = self.engine.processor
        if not renders.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template: set tokenizer.chat_template, or evaluate "
                "with apply_chat_template=False"
            )
        return renders.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # ---- likelihoods

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is greedy."""
        if not any(len(request.args) > 2 for request in requests):
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        scored: list[Scored] = []
        inputs: list[tuple[EncoderInput, ...]] = []
        for request in requests:
            arguments = cast("tuple[str, str, dict[str, Any]]", request.args)
            context, continuation, media = arguments
            spaces = len(context) - len(context.rstrip())
            cut = len(context) - spaces
            full_ids, prompt_images = self._with_images(context + continuation, media)
            start, _ = self._with_images(context[:cut], media)
            scored.append((request.args, full_ids[: len(start)], full_ids[len(start) :]))
            inputs.append(prompt_images)
        return self._loglikelihood_tokens(scored, disable_tqdm=disable_tqdm, inputs=inputs)

    def _with_images(
        self, text: str, media: dict[str, Any]
    ) -> tuple[list[int], tuple[EncoderInput, ...]]:
        """Return the tokens of a text with the images of a document, and the images.

        Raises:
            ConfigError: the engine reads no images, or the document has recordings.
        """
        other_media = sorted(media.keys() - {"visual"})
        if other_media or self._images is None:
            raise ConfigError(
                f"the task has {', '.join(other_media) or 'images'}, and this engine reads "
                f"{'text' if self._images is None else 'text and images'} only: choose another "
                "task or model"
            )
        return self._images.prompt(text, media["visual"], self.tok_encode)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Scored],
        disable_tqdm: bool = False,
        inputs: Sequence[tuple[EncoderInput, ...]] | None = None,
        **_: object,
    ) -> list[tuple[float, bool]]:
        """Return the total log-probability of each continuation, and whether it is greedy.

        Args:
            requests: cache key, context and continuation of each request.
            disable_tqdm: whether to show no progress bar.
            inputs: images of each request; None = no images.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
        prompts, lengths = [], []
        for _key, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens cannot be scored within "
                    f"max_model_len {self.engine.max_model_len}: raise it"
                )
            full_ids = context + continuation
            prompts.append(full_ids if inputs else full_ids[-(self.max_length + 1) :])
            lengths.append(len(continuation))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(prompts)
        # Longest first: the remaining time is not underestimated, and equal prefixes are adjacent.
        order = sorted(
            range(len(prompts)), key=lambda place: (-len(prompts[place]), prompts[place])
        )
        with _progress("loglikelihood", len(order), disable_tqdm) as bar:
            for start in range(0, len(order), self.batch_size):
                places = order[start : start + self.batch_size]
                images = None if inputs is None else [inputs[place] for place in places]
                outputs = self.engine.generate(
                    [prompts[place] for place in places], params, encoder_inputs=images
                )
                for place, output in zip(places, outputs, strict=True):
                    prompt, length = prompts[place], lengths[place]
                    scores = output.prompt_logprobs
                    assert scores is not None, "prompt_logprobs were asked for"
                    token_logprobs = [
                        position[token]
                        for token, position in zip(
                            prompt[-length:], scores[-length:] if length else (), strict=False
                        )
                        if position is not None
                    ]
                    total = float(sum(score.logprob for score in token_logprobs))
                    results[place] = total, all(score.rank == 1 for score in token_logprobs)
                    key = requests[place][0]
                    if key is not None:  # windows of a rolling likelihood have none
                        self.cache_hook.add_partial("loglikelihood", key, results[place])
                bar.update(len(places))
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of texts. Each token is scored once, in windows of
        `max_length`."""
        windows: list[Scored] = []
        owners: list[int] = []
        for place, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for pair in pairs:
                context, continuation = make_disjoint_window(pair)
                windows.append((None, context, continuation))
                owners.append(place)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for place, (score, _greedy) in zip(owners, scores, strict=True):
            totals[place] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ---- generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuations, each truncated at its first stop string."""
        prompts, options, images = [], [], []
        for request in requests:
            context, keywords, *media = cast("tuple[Any, ...]", request.args)
            params = self._sampling(keywords)
            room = self.engine.max_model_len - (params.max_tokens or 1)
            if room < 1:
                raise ConfigError(
                    f"max_gen_toks {params.max_tokens} leaves no room for a prompt within "
                    f"max_model_len {self.engine.max_model_len}"
                )
            if media:
                tokens, prompt_images = self._with_images(context, media[0])
            else:
                tokens, prompt_images = self.tok_encode(context)[-room:], ()
            prompts.append(tokens)
            images.append(prompt_images)
            options.append(params)
        texts = [""] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        with _progress("generate_until", len(order), disable_tqdm) as bar:
            for start in range(0, len(order), self.batch_size):
                places = order[start : start + self.batch_size]
                outputs = self.engine.generate(
                    [prompts[place] for place in places],
                    [options[place] for place in places],
                    encoder_inputs=[images[place] for place in places],
                )
                for place, output in zip(places, outputs, strict=True):
                    stops = list(options[place].stop)
                    text = postprocess_generated_text(output.outputs[0].text, stops, None)
                    texts[place] = text
                    self.cache_hook.add_partial("generate_until", requests[place].args, text)
                bar.update(len(places))
        return texts

    def _sampling(self, keywords: dict[str, Any]) -> SamplingParams:
        """Convert the generation keywords of a task to sampling options.

        Raises:
            ConfigError: the engine does not support a keyword.
        """
        options: dict[str, Any] = dict(normalize_gen_kwargs(keywords, self.max_gen_toks))
        if options.pop("num_beams", 1) != 1:
            raise ConfigError(
                "beam search follows no stop strings, which tasks have: drop num_beams"
            )
        stops = [stop for stop in options.pop("until", ()) if stop]
        length = options.pop("max_gen_toks")
        options = {name: value for name, value in options.items() if name not in _IGNORED}
        unknown = sorted(set(options) - set(SamplingParams.model_fields))
        if unknown:
            hint = did_you_mean(unknown[0], SamplingParams.model_fields)
            raise ConfigError(f"generation keyword {unknown[0]!r} is not known{hint}")
        eos = self.tokenizer.decode([self.eot_token_id]) if self.eot_token_id is not None else ""
        if eos and eos not in stops:
            stops.append(eos)
        # As in the Hugging Face backend: tasks may search for markup in the text.
        temperature = 1.0 if keywords.get("do_sample") else 0.0
        options = {"skip_special_tokens": False, "temperature": temperature, **options}
        return SamplingParams(max_tokens=length, stop=tuple(stops), **options)


def _progress(description: str, total: int, disable: bool) -> tqdm[NoReturn]:
    """Create a progress bar. It is disabled if stderr is not a terminal."""
    return tqdm(total=total, desc=description, disable=True if disable else None)
