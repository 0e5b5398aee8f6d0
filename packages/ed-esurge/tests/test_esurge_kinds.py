"""Layers of different kinds in the engine: recurrent states, and windows with separate pages.

The memory of the toy model is a linear recurrence over a convolution of two inputs. Its state is
stored in the slot of the sequence. A state in a wrong slot, or of an earlier sequence, changes the
tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from ed_esurge import PoolingParams, SamplingParams, eSurge
from ed_esurge.engine import setup
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.cache import RecurrentSpec, StateSpec
from ed_layers.mlp import GatedMLP
from ed_models.adapters.lora import lora_layers
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.families.jamba import JambaConfig, JambaForCausalLM
from ed_models.tasks.causal_lm import CausalLM
from flax import nnx

VOCAB, WINDOW = 64, 6


class ToyConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    model_type = "toy_kinds"
    kinds: str = "memory"
    """Kinds of the layers, separated by commas."""


class Memory(nnx.Module):
    """`h[t] = a h[t-1] + y[t]` with `y[t] = u[t] + u[t-1] / 2`, sequence by sequence."""

    def __init__(self, parts):
        d = parts.config.hidden_size
        self.in_proj = parts.linear(d, d, axes=("embed", None))
        self.out_proj = parts.linear(d, d, axes=(None, "embed"))
        self.cache_spec = RecurrentSpec((StateSpec("h", (d,)), StateSpec("last", (d,))))

    def __call__(self, x, ctx, cache, layer):
        u = self.in_proj(x, ctx)[0]
        tokens, d = u.shape
        if ctx.ragged is None:
            begins, of_token = jnp.arange(tokens) == 0, jnp.zeros(tokens, jnp.int32)
            states = {"h": jnp.zeros((1, d)), "last": jnp.zeros((1, d))}
        else:
            of_token = ctx.ragged.seq_of_token
            begins = jnp.arange(tokens) == ctx.ragged.cu_q_lens[of_token]
            states = cache.get(layer, ragged=ctx.ragged)
        before = jnp.where(begins[:, None], states["last"][of_token], jnp.roll(u, 1, axis=0))

        def step(h, now):
            y, begin, start = now
            h = jnp.linspace(0.3, 0.95, d) * jnp.where(begin, start, h) + y
            return h, h

        _, h = jax.lax.scan(step, u[0], (u + before / 2, begins, states["h"][of_token]))
        if ctx.ragged is not None:
            last = jnp.maximum(ctx.ragged.cu_q_lens[1:] - 1, 0)
            cache = cache.set(layer, {"h": h[last], "last": u[last]}, ragged=ctx.ragged)
        return self.out_proj(jnp.tanh(h)[None], ctx), cache


class ToyLayer(DecoderLayer):
    def __init__(self, parts, index):
        kind = parts.config.kinds.split(",")[index]
        window = WINDOW if kind == "window" else None
        mixer: Any = (
            Memory(parts)
            if kind == "memory"
            else SelfAttention(parts, mask=MaskRule(window=window))
        )
        super().__init__(parts, self_attn=mixer, mlp=GatedMLP(parts))


class ToyModel(Decoder):
    config_class = ToyConfig
    layer_class = ToyLayer

    @staticmethod
    def layer_kinds(config):
        return config.kinds.split(",")


class ToyForCausalLM(CausalLM):
    config_class = ToyConfig
    body_class = ToyModel


def toy(kinds: str):
    layers = len(kinds.split(","))
    fields = tiny_llama(vocab_size=VOCAB, num_hidden_layers=layers, initializer_range=0.3)
    fields.pop("model_type")
    config = ToyConfig(**fields, kinds=kinds, scan_layers=False, sharding_axis_dims=(1,) * 5)
    return ToyForCausalLM.create(config, seed=4)


def engine_of(model, **options) -> eSurge:
    fixed = {
        "max_num_seqs": 4,
        "page_size": 4,
        "max_num_seq_buckets": (4,),  # rows of a bucket are often empty
        "max_num_batched_tokens": 12,
        "max_model_len": 48,
        "compile_runner": False,
        "silent_mode": True,
    }
    return eSurge(model, **{**fixed, **options})


def plain(model):
    """Return the plain forward pass: tokens -> (logits [s, v], hidden states [s, d])."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, ids):
        out = nnx.merge(graphdef, state)(ids)
        return out.logits[0], out.last_hidden_state[0]

    def of(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.zeros((1, 48), np.int32)
        ids[0, : len(tokens)] = tokens  # padding on the right does not change causal logits
        logits, hidden = forward(state, ids)
        return np.asarray(logits[: len(tokens)]), np.asarray(hidden[: len(tokens)], np.float64)

    return of


def greedy(forward, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(forward(tokens)[0][-1].argmax()))
    return tokens[len(prompt) :]


PROMPTS = [
    np.random.default_rng(5).integers(3, VOCAB, size=n).tolist()
    for n in (3, 17, 1, 9, 26, 5, 2, 13)
]
LENGTHS = (14, 8, 20, 11, 6, 18, 9, 12)


def params_of(length: int, index: int) -> SamplingParams:
    # Every second request also has a row of the sampler's state, which is independent of layers.
    bias = {5: 0.25} if index % 2 else {}
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logit_bias=bias)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        pytest.param("memory,memory", {}, marks=pytest.mark.nightly),
        ("memory,full", {"num_pages": 12, "scheduling_policy": "priority"}),
        ("window,memory,full", {"num_pages": 13, "scheduling_policy": "priority"}),
    ],
)
def test_recurrent_states_survive_scheduling_and_preemption(kinds, options, monkeypatch):
    """Each request produces the tokens that it produces alone, also after a preemption."""
    monkeypatch.setattr(setup, "STATE_SPACING", 4)
    model = toy(kinds)
    engine = engine_of(model, **options)
    params = [params_of(length, index) for index, length in enumerate(LENGTHS)]
    alone = [
        engine.generate(prompt, own)[0].outputs[0].token_ids
        for prompt, own in zip(PROMPTS, params, strict=True)
    ]
    forward = plain(model)
    for index in (0, 2, 4):  # without a bias: the plain forward pass is the reference
        assert alone[index] == greedy(forward, PROMPTS[index], LENGTHS[index])
    together: dict[str, list[int]] = {}
    waiting = list(range(len(PROMPTS)))
    step = 0
    while waiting or engine.has_unfinished_requests:
        if waiting and step % 3 == 0:
            index = waiting.pop(0)
            together[str(index)] = []
            # With this policy, the newest request has the highest priority and preempts others.
            engine.add_request(str(index), PROMPTS[index], params[index], priority=-index)
        if step == 7:
            engine.add_request("gone", PROMPTS[4], params[4])
        if step == 10:
            assert engine.abort_request("gone")
        for output in engine.step():
            together.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        step += 1
    together.pop("gone")
    assert list(together.values()) == alone
    if "num_pages" in options:
        assert engine.stats()["num_preemptions"] > 0
    assert engine.stats()["prefix_cache_hits"] > 0  # from saved states


@pytest.mark.nightly
def test_hybrid_model_produces_tokens_of_generate():
    """Jamba has recurrences, attention and experts. Prompts are chunked and sequences preempted."""
    config = JambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=3,
        mamba_d_state=4,
        scan_layers=False,
        sharding_axis_dims=(1,) * 5,
    )
    model = JambaForCausalLM.create(config, seed=4)
    engine, prompts, new = engine_of(model, num_pages=10, max_model_len=36), PROMPTS[1:5], 8
    outputs = engine.generate(prompts, [params_of(new, 0)] * len(prompts))
    width = max(map(len, prompts))
    ids = np.asarray([[0] * (width - len(p)) + p for p in prompts], np.int32)
    mask = np.asarray([[0] * (width - len(p)) + [1] * len(p) for p in prompts], np.int32)
    alone = model.generate(ids, attention_mask=mask, max_new_tokens=new, eos_token_id=[])
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == alone.sequences[:, width:].tolist()
    assert engine.stats()["num_preemptions"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "option", [{"batch_invariant": True}, {"speculative_config": {}}, {"kv_offloading_size": 1}]
)
def test_recurrent_model_rejects_unsupported_options(option):
    with pytest.raises(ConfigError, match="num_states 4 is for models with recurrent layers"):
        engine_of(toy("full"), num_states=4)
    with pytest.raises(ConfigError, match=f"{next(iter(option))} is for models whose layers read"):
        engine_of(toy("memory,full"), **option)


@pytest.mark.nightly
@pytest.mark.parametrize("kinds", ["memory,memory", "window,memory,full"])
def test_turns_with_adapters_continue_from_their_states(kinds, monkeypatch):
    """Tokens and log-probabilities are those without saved states, in one program and in single
    steps, and a state belongs to its adapter."""
    monkeypatch.setattr(setup, "STATE_SPACING", 4)
    model = toy(kinds)
    adapted = model.apply_lora(LoraSpec(rank=2, targets=("in_proj", "out_proj")), name="one")
    for i, (_, layer) in enumerate(lora_layers(adapted)):
        key = jax.random.fold_in(jax.random.key(3), i)
        layer.lora_b.set_value(0.3 * jax.random.normal(key, layer.lora_b.shape))
    # With 4 sequences, the pool of a window has no room for the pages of both prompts.
    sizes = {"max_num_seqs": 8, "max_num_seq_buckets": (8,), "max_model_len": 64}
    sizes |= {"max_loras": 1, "max_lora_rank": 2}
    engines = [
        engine_of(model, **sizes, num_states=24),
        engine_of(model, **sizes, num_states=3, num_scheduler_steps=1, async_scheduling=False),
        engine_of(model, **sizes, enable_prefix_caching=False),
    ]
    params = SamplingParams(
        temperature=1.0, seed=2, n=3, max_tokens=11, ignore_eos=True, logprobs=0
    )
    prompts = {None: PROMPTS[1], "one": PROMPTS[1]}
    cached = []
    for engine in engines:
        engine.load_lora_adapter("one", adapted)
    for _ in range(3):
        for name, prompt in prompts.items():
            outputs = [engine.generate(prompt, params, lora_name=name)[0] for engine in engines]
            cached.append([output.metrics.num_cached_tokens for output in outputs])
            for output in outputs[:2]:
                for answer, expected in zip(output.outputs, outputs[2].outputs, strict=True):
                    assert answer.token_ids == expected.token_ids
                    lines, others = answer.logprobs or (), expected.logprobs or ()
                    for token, found, right in zip(answer.token_ids, lines, others, strict=True):
                        assert found[token].logprob == pytest.approx(right[token].logprob, abs=1e-4)
            prompts[name] = [*prompt, *outputs[2].outputs[0].token_ids[:9], 7, 8]
    assert [turn[0] for turn in cached[:2]] == [0, 0]  # the adapter has states of its own
    assert all(turn[0] >= 16 for turn in cached[2:])
    assert not any(turn[2] for turn in cached)


@pytest.mark.nightly
def test_pooling_of_a_recurrent_model_spans_chunks():
    model = toy("memory,full")
    engine = engine_of(model)
    forward = plain(model)
    outputs = engine.embed(PROMPTS, PoolingParams(pooling="mean", normalize=False))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        exact = forward(prompt)[1].mean(axis=0)
        np.testing.assert_allclose(output.pooled, exact, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kinds", ["window,full,window", pytest.param("window,window", marks=pytest.mark.nightly)]
)
def test_pages_before_the_window_are_freed(kinds):
    """The pool has fewer pages than a whole sequence needs, with and without a prefix cache."""
    model = toy(kinds)
    forward = plain(model)
    expected = [greedy(forward, p, n) for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    params = [params_of(length, 0) for length in LENGTHS]
    for caching in (True, False):
        engine = engine_of(model, enable_prefix_caching=caching)
        pools = engine.loop.scheduler.pages.pools
        # 12 new tokens and the 5 tokens before them span at most 5 pages.
        sizes = {"full": 4 * 12, "window": 4 * 5}
        assert {name: pool.num_pages for name, pool in pools.items()} == {
            name: size for name, size in sizes.items() if name in kinds
        }
        for _ in range(2):  # the second run uses the prefix cache
            outputs = engine.generate(PROMPTS, params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            assert all(pool.usage == 0 for pool in pools.values())
        assert (engine.stats()["prefix_cache_hits"] > 0) == caching
        engine.add_request("long", PROMPTS[4], params[2])
        while engine.has_unfinished_requests:
            engine.step()
            for request in engine.loop.scheduler.running:
                held = [page for page in request.pages["window"] if page >= 0]
                assert len(held) <= 5
                if "full" in kinds:
                    assert len(request.pages["full"]) * 4 >= request.num_computed


@pytest.mark.nightly
def test_salt_separates_cached_prefixes(monkeypatch):
    model = toy("full")
    prompt, params = PROMPTS[4], params_of(2, 0)
    engine = engine_of(model)

    def cached(salt: str | None) -> int:
        engine.add_request("x", prompt, params, cache_salt=salt)
        outputs = []
        while engine.has_unfinished_requests:
            outputs += engine.step()
        return outputs[-1].metrics.num_cached_tokens

    assert [cached(salt) for salt in (None, "a", "b", "a", None)] == [0, 0, 0, 24, 24]
    # Prompts with different rotary factors have different keys for the same tokens.
    monkeypatch.setattr(ToyForCausalLM, "prompt_class", lambda self, length: int(length > 20))
    engine = engine_of(model)
    hits = [
        engine.generate(prompt[:length], params)[0].metrics.num_cached_tokens
        for length in (9, 26, 18, 24)
    ]
    assert hits == [0, 0, 8, 20]


@pytest.mark.nightly
def test_windowed_pages_survive_host_memory_and_preemption():
    """Host memory restores the pages of layers with a window, also for preempted sequences."""
    model = toy("window,full")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 60, size=n).tolist() for n in (29, 21, 33, 26, 17)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    tokens = [o.outputs[0].token_ids for o in engine_of(model).generate(prompts, params)]
    engine = engine_of(model, num_pages=13, kv_offloading_size=2.0**-10, overlap_execution=True)
    for _ in range(2):
        found = engine.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in found] == tokens
    for prompt, expected in zip(prompts, tokens, strict=True):
        assert engine.generate(prompt, params)[0].outputs[0].token_ids == expected
    stats = engine.stats()
    assert stats["external_prefix_cache_hits"] > 60
    assert stats["kv_cache_usage"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("kinds", ["window,full,window", "memory,full"])
def test_beams_of_windows_and_recurrent_layers_follow_their_definition(kinds):
    """Beams share the pages of windows, and copy recurrent states."""
    model = toy(kinds)
    forward, prompt, width, count = plain(model), PROMPTS[1], 3, 11
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(count):
        new = []
        for tokens, total in beams:
            line = forward([*prompt, *tokens])[0][-1].astype(np.float64)
            line -= np.log(np.exp(line - line.max()).sum()) + line.max()
            new += [([*tokens, int(t)], total + line[t]) for t in np.argsort(-line)[: 2 * width]]
        beams = sorted(new, key=lambda one: -one[1])[:width]
    params = SamplingParams(use_beam_search=True, n=width, max_tokens=count, ignore_eos=True)
    engine = engine_of(model, compile_runner=True)
    outputs = engine.generate([prompt], params)[0].outputs
    assert engine.stats()["recompiles"] == 0
    assert [out.token_ids for out in outputs] == [tokens for tokens, _ in beams]
    assert [out.cumulative_logprob for out in outputs] == pytest.approx(
        [b[1] for b in beams], abs=1e-3
    )
    assert all(pool.usage == 0 for pool in engine.loop.scheduler.pages.pools.values())
