"""Compare encoder-decoders with CTranslate2 (the engine of faster-whisper) and torch, in one run.

uv run --with ctranslate2 python -m tools.bench.seq2seq
uv run ... python -m tools.bench.seq2seq --shape whisper-tiny t5-small --batch 1 8 --beams 1 4
uv run python -m tools.bench.seq2seq --contenders torch ours               without CTranslate2

All contenders load one checkpoint with random weights. Whisper reads the features of 30 seconds of
synthetic sound; texts have `--length` tokens. Every contender generates exactly `--tokens` tokens,
because the end token is suppressed. Our int8 is `w8a8`; CTranslate2's is `int8`. The float32
contenders must generate equal tokens, which is checked first and printed.

For Whisper, "encode" is the encoder alone, "decode" the generation from an encoder output, and
"both" the generation from features. CTranslate2 has no separate encoder for texts.

Runs are interleaved; a run repeats short calls for a tenth of a second. A cell contains the median
in milliseconds and the ratio to CTranslate2 in the same number format (above 1 = faster than
CTranslate2), or to torch without CTranslate2.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import Run, all_turns, command_line, cores, machine, settled, table

#: Fields of the configurations of openai/whisper-*, google-t5/t5-small, Helsinki-NLP/opus-mt-en-de.
SHAPES: dict[str, dict[str, Any]] = {
    "whisper-tiny": {"d_model": 384, "layers": 4, "heads": 6},
    "whisper-base": {"d_model": 512, "layers": 6, "heads": 8},
    "whisper-small": {"d_model": 768, "layers": 12, "heads": 12},
    "t5-small": {},
    "marian": {},
}
WHISPER_VOCAB, END = 51865, 50257
#: Start, English, transcribe, no timestamps.
WHISPER_PROMPT = [50258, 50259, 50359, 50363]
#: Special tokens of Whisper that CTranslate2 looks up.
WHISPER_NAMES = {
    50257: "<|endoftext|>",
    50258: "<|startoftranscript|>",
    50259: "<|en|>",
    50358: "<|translate|>",
    50359: "<|transcribe|>",
    50360: "<|startoflm|>",
    50361: "<|startofprev|>",
    50362: "<|nospeech|>",
    50363: "<|notimestamps|>",
}
PARTS = ("encode", "decode", "both")


def is_speech(shape: str) -> bool:
    """Return whether a shape reads sound."""
    return shape.startswith("whisper")


def model_of(shape: str) -> Any:
    """Return the model of `transformers` with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    if is_speech(shape):
        fields = SHAPES[shape]
        sizes = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (
                ("layers", fields["layers"]),
                ("attention_heads", fields["heads"]),
                ("ffn_dim", 4 * fields["d_model"]),
            )
        }
        config = transformers.WhisperConfig(
            d_model=fields["d_model"],
            vocab_size=WHISPER_VOCAB,
            decoder_start_token_id=50258,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **sizes,
        )
        return transformers.WhisperForConditionalGeneration(config)
    if shape == "t5-small":
        config = transformers.T5Config()
        config.decoder_start_token_id = 0
        return transformers.T5ForConditionalGeneration(config)
    vocab = 58101
    settings: dict[str, Any] = {"static_position_embeddings": True, "tie_word_embeddings": True}
    config = transformers.MarianConfig(
        vocab_size=vocab,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        pad_token_id=vocab - 1,
        decoder_start_token_id=vocab - 1,
        bos_token_id=0,
        eos_token_id=0,
        forced_eos_token_id=None,
        **settings,
    )
    return transformers.MarianMTModel(config)


def save_random(directory: Path, shape: str) -> Any:
    """Write a checkpoint of the shape with random weights, and a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = model_of(shape)
    config = model.config
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    model.save_pretrained(directory)
    words = [f"w{i}" for i in range(config.vocab_size)]
    end = END if is_speech(shape) else config.eos_token_id
    pad = END if is_speech(shape) else config.pad_token_id
    words[pad], words[end] = "<pad>", "</s>"
    if is_speech(shape):
        for i, name in WHISPER_NAMES.items():
            words[i] = name
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "w2")),
        unk_token="w2",
        eos_token=words[end],
        pad_token=words[pad],
    )
    tokenizer.save_pretrained(directory)
    (directory / "words.json").write_text(json.dumps(words))
    return config


class Torch:
    """`transformers` on torch, float32, greedy."""

    def __init__(self, directory: Path, shape: str):
        import torch
        import transformers

        self.torch, self.speech = torch, is_speech(shape)
        name = json.loads((directory / "config.json").read_text())["architectures"][0]
        self.model = getattr(transformers, name).from_pretrained(directory).eval()

    def encode(self, x: np.ndarray) -> Any:
        """Return the encoder output."""
        with self.torch.inference_mode():
            return self.model.get_encoder()(self.torch.from_numpy(x))

    def decode(self, encoded: Any, tokens: int, beams: int) -> np.ndarray:
        """Return the tokens that are generated from an encoder output."""
        return self.generated(tokens, beams, len(encoded[0]), encoder_outputs=encoded)

    def both(self, x: np.ndarray, tokens: int, beams: int) -> np.ndarray:
        """Return the tokens that are generated from inputs."""
        name = "input_features" if self.speech else "input_ids"
        return self.generated(tokens, beams, len(x), **{name: self.torch.from_numpy(x)})

    def generated(self, tokens: int, beams: int, rows: int, **inputs: Any) -> np.ndarray:
        """Return the new tokens of `GenerationMixin.generate`."""
        from transformers import GenerationConfig, GenerationMixin

        ids = None
        if self.speech:
            ids = self.torch.tensor([WHISPER_PROMPT] * rows)
        end = END if self.speech else self.model.config.eos_token_id
        config = GenerationConfig(
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            num_beams=beams,
            eos_token_id=end,
            pad_token_id=end if self.speech else self.model.config.pad_token_id,
            decoder_start_token_id=self.model.config.decoder_start_token_id,
            suppress_tokens=suppressed(self.model.config, self.speech),
        )
        with self.torch.inference_mode():
            # Whisper overrides `generate` by a loop over windows.
            mixin: Any = GenerationMixin
            found = mixin.generate(
                self.model, decoder_input_ids=ids, generation_config=config, **inputs
            )
        return found[:, -tokens:].numpy()


class Ours:
    """This project; `quantized` is the format of every matrix."""

    def __init__(self, directory: Path, shape: str, quantized: str | None = None):
        import jax
        from ed_infra.inputs import Inputs
        from ed_models.auto import (
            AutoEasyDeLModelForSeq2SeqLM,
            AutoEasyDeLModelForSpeechSeq2Seq,
        )
        from flax import nnx

        self.speech = is_speech(shape)
        auto = AutoEasyDeLModelForSpeechSeq2Seq if self.speech else AutoEasyDeLModelForSeq2SeqLM
        model: Any = auto.from_pretrained(
            directory,
            config_kwargs={"scan_layers": False, "easy_method": "serve"},
            dtype="float32",
            param_dtype="float32",
        )
        if quantized is not None:
            model = model.quantize([("", {"dtype": quantized})])
        self.model = model
        graphdef, self.state = nnx.split(model)
        name = "input_features" if self.speech else "input_ids"

        def encode(state: Any, x: Any) -> Any:
            return nnx.merge(graphdef, state).encode(Inputs({name: x})).embeddings

        self.run = jax.jit(encode)

    def encode(self, x: np.ndarray) -> Any:
        """Return the encoder output."""
        return self.run(self.state, x if self.speech else x.astype(np.int32)).block_until_ready()

    def decode(self, encoded: Any, tokens: int, beams: int) -> np.ndarray:
        """Return the tokens that are generated from an encoder output."""
        return self.generated(tokens, beams, len(encoded), inputs={"encoder_outputs": encoded})

    def both(self, x: np.ndarray, tokens: int, beams: int) -> np.ndarray:
        """Return the tokens that are generated from inputs."""
        inputs = {"input_features" if self.speech else "input_ids": x}
        return self.generated(tokens, beams, len(x), **inputs)

    def generated(self, tokens: int, beams: int, rows: int, **inputs: Any) -> np.ndarray:
        """Return the new tokens of `generate`."""
        if self.speech:
            inputs["decoder_input_ids"] = np.array([WHISPER_PROMPT] * rows)
        config = self.model.config
        found = self.model.generate(
            **inputs,
            max_new_tokens=tokens,
            num_beams=beams,
            eos_token_id=None,
            suppress_tokens=[*suppressed(config, self.speech), end_of(config, self.speech)],
        )
        return found.sequences[:, -tokens:]


class CTranslate2:
    """CTranslate2, as faster-whisper calls it."""

    def __init__(self, directory: Path, shape: str, compute: str = "float32"):
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        self.speech, self.api = is_speech(shape), ctranslate2
        path = directory / f"ctranslate2-{compute}"
        kind = None if compute == "float32" else compute
        TransformersConverter(str(directory)).convert(str(path), quantization=kind)
        make = ctranslate2.models.Whisper if self.speech else ctranslate2.Translator
        self.model = make(str(path), compute_type=compute, intra_threads=cores(), inter_threads=1)
        self.words = json.loads((directory / "words.json").read_text())
        self.ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, x: np.ndarray) -> Any:
        """Return the encoder output."""
        return self.model.encode(self.api.StorageView.from_array(x))

    def decode(self, encoded: Any, tokens: int, beams: int) -> np.ndarray:
        """Return the tokens that are generated from an encoder output."""
        found = self.model.generate(
            encoded,
            [WHISPER_PROMPT] * encoded.shape[0],
            beam_size=beams,
            # CTranslate2 generates at most half of this number.
            max_length=max(2 * tokens, len(WHISPER_PROMPT) + tokens),
            suppress_blank=False,
            suppress_tokens=[*range(END, WHISPER_VOCAB)],
        )
        return np.array([row.sequences_ids[0] for row in found])[:, -tokens:]

    def both(self, x: np.ndarray, tokens: int, beams: int) -> np.ndarray:
        """Return the tokens that are generated from inputs."""
        if self.speech:
            return self.decode(self.api.StorageView.from_array(x), tokens, beams)
        found = self.model.translate_batch(
            [[self.words[i] for i in row] for row in x],
            beam_size=beams,
            max_decoding_length=tokens,
            min_decoding_length=tokens,
        )
        return np.array([[self.ids[word] for word in row.hypotheses[0]] for row in found])


def end_of(config: Any, speech: bool) -> int:
    """Return the end token."""
    return END if speech else config.eos_token_id


def suppressed(config: Any, speech: bool) -> list[int]:
    """Return tokens besides the end token that no contender generates."""
    if speech:
        return [*range(END + 1, WHISPER_VOCAB)]
    return [config.pad_token_id] if config.pad_token_id != 0 else []


CONTENDERS: dict[str, Callable[..., Any]] = {
    "torch": Torch,
    "ctranslate2": CTranslate2,
    "ours": Ours,
    "ctranslate2 int8": partial(CTranslate2, compute="int8"),
    "ours int8": partial(Ours, quantized="w8a8"),
}


def inputs_of(shape: str, config: Any, batch: int, length: int) -> np.ndarray:
    """Return features of sound, or tokens."""
    rng = np.random.default_rng(0)
    if not is_speech(shape):
        return rng.integers(10, config.vocab_size - 10, (batch, length))
    from transformers import WhisperFeatureExtractor

    seconds = np.arange(30 * 16000) / 16000
    pitches = [200 + 40 * row + 30 * np.sin(seconds) for row in range(batch)]
    chirps = [np.sin(2 * np.pi * pitch * seconds) for pitch in pitches]
    waves = [0.1 * x + 0.01 * rng.standard_normal(x.shape) for x in chirps]
    extractor = WhisperFeatureExtractor()
    return extractor(waves, sampling_rate=16000, return_tensors="np")["input_features"]


def rival_of(name: str, medians: dict[str, float]) -> float | None:
    """Return the time that a contender's ratio refers to."""
    peer = "ctranslate2 int8" if "int8" in name else "ctranslate2"
    return medians.get(peer, medians.get("torch"))


def measure(shape: str, made: dict[str, Any], config: Any, options: Any) -> None:
    """Time all parts and batches of a shape, and print a table."""
    rows: dict[str, list[str]] = {name: [name] for name in made}
    header = ["ms (ratio)"]
    check = inputs_of(shape, config, 1, options.length)
    tokens = {name: of.both(check, options.tokens, 1) for name, of in made.items()}
    first = next(iter(tokens))
    same = [f"{n} {(x == tokens[first]).mean():.0%}" for n, x in tokens.items() if n != first]
    print(f"\n{shape}, {options.tokens} tokens; tokens equal to {first}: {', '.join(same)}\n")
    for batch in options.batch:
        x = inputs_of(shape, config, batch, options.length)
        for beams in options.beams:
            for part in options.part:
                if part != "both" and (not is_speech(shape) or (part == "encode" and beams > 1)):
                    continue
                runs: dict[str, Run] = {}
                for name, of in made.items():
                    if part == "encode":
                        runs[name] = partial(of.encode, x)
                    elif part == "both":
                        runs[name] = partial(of.both, x, options.tokens, beams)
                    else:
                        runs[name] = partial(of.decode, of.encode(x), options.tokens, beams)
                runs = {name: settled(run) for name, run in runs.items()}
                turns = all_turns(runs, rounds=options.rounds)
                medians = {name: statistics.median(times) for name, times in turns.items()}
                header.append(f"{part}, {batch}" + (f", {beams} beams" if beams > 1 else ""))
                for name, seconds in medians.items():
                    rival = rival_of(name, medians)
                    ratio = f" ({rival / seconds:.2f})" if rival else ""
                    rows[name].append(f"{seconds * 1e3:.1f}{ratio}")
    print(table(header, [*rows.values()]), flush=True)


def main() -> None:
    parser = command_line("seq2seq", __doc__)
    add = parser.add_argument
    add("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--part", nargs="+", choices=PARTS, default=PARTS)
    add("--batch", type=int, nargs="+", default=[1])
    add("--beams", type=int, nargs="+", default=[1])
    add("--length", type=int, default=64)
    add("--tokens", type=int, default=64)
    add("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            config = save_random(directory, shape)
            made = {key: CONTENDERS[key](directory, shape) for key in options.contenders}
            measure(shape, made, config, options)


if __name__ == "__main__":
    main()
