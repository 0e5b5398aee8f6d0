"""A tiny model and engines that the tests of this package share."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from ed_esurge.testing import byte_tokenizer
from ed_infra.testing import tiny_llama

sys.path.insert(0, str(Path(__file__).parent))  # `image_requests`, which tests share

VOCAB = 260  # 258 tokens of the byte tokenizer, and two ids without a text
ONE_DEVICE = (1, 1, 1, 1, 1)


def build_llama(seed: int = 1, mesh=ONE_DEVICE, dtype="float32", **changes):
    """A random Llama of two layers whose predictions are far from uniform."""
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    known = {"vocab_size": VOCAB, "num_hidden_layers": 2, "initializer_range": 0.2}
    fields = tiny_llama(**{**known, **changes})
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=mesh)
    return LlamaForCausalLM.create(config, seed=seed, dtype=dtype, param_dtype=dtype)


@pytest.fixture(scope="session")
def make_llama():
    return build_llama


@pytest.fixture(scope="session")
def llama():
    return build_llama()


@pytest.fixture(scope="session")
def plain_logits(llama):
    """The plain forward pass, tokens -> float64 logits [s, v]; compiled for one length."""
    import jax
    from flax import nnx

    graphdef, state = nnx.split(llama)
    forward = jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids).logits)

    def logits(tokens: list[int]) -> np.ndarray:
        ids = np.zeros((1, 64), np.int32)
        ids[0, : len(tokens)] = tokens  # padding on the right does not change causal logits
        return np.asarray(forward(state, ids)[0, : len(tokens)], np.float64)

    return logits


@pytest.fixture(scope="session")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="session")
def surge(llama, tokenizer):
    """An engine that prefills prompts in chunks and runs four of eight requests simultaneously."""
    from ed_esurge import eSurge

    return eSurge(
        llama,
        tokenizer,
        max_num_seqs=4,
        page_size=8,
        max_num_batched_tokens=16,
        max_model_len=128,
        silent_mode=True,
    )


@pytest.fixture(scope="session")
def prompts():
    """Eight prompts of different lengths."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, size=n).tolist() for n in (1, 5, 17, 40, 3, 9, 30, 2)]


@pytest.fixture(scope="session")
def oracle():
    """A proposer of the known outputs, with a wrong token at every fourth position."""
    from ed_esurge.core.proposals import Proposer

    class Oracle(Proposer):
        def __init__(self, most: int, outputs) -> None:
            super().__init__(most)
            self._known = {
                (tuple(out.prompt_token_ids), i): one.token_ids
                for out in outputs
                for i, one in enumerate(out.outputs)
            }

        def propose(self, request, most):
            index = int(request.request_id.rpartition("#")[2])
            done = len(request.output)
            known = self._known[tuple(request.prompt), index][done : done + most]
            return [token if (done + i) % 4 else (token + 1) % 250 for i, token in enumerate(known)]

        def forget(self, request):
            pass

    return Oracle


# Renders the number of tools, and opens thoughts if `think` is set.
SHORT_TEMPLATE = (
    "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}{{ m.content }}\n"
    "{% endfor %}{% if think %}<think>{% endif %}"
)


@pytest.fixture(scope="session")
def engine_behind(llama):
    """An engine for tests over HTTP: few shapes, each compiled at its first use.

    These tests form one xdist group, so that one worker creates one engine.
    """
    from ed_esurge import eSurge

    tokenizer = byte_tokenizer(SHORT_TEMPLATE)
    tokenizer.add_tokens(["</think>"])
    return eSurge(
        llama,
        tokenizer,
        model_name="tiny",
        max_model_len=256,
        max_num_seqs=8,
        max_num_seq_buckets=(8,),
        max_num_batched_tokens=32,
        min_input_pad=32,
        page_size=16,
        extra_eos_token_ids=(257,),
        compile_runner=False,
        silent_mode=True,
    )
