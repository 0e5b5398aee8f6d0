"""Compare `draft` with a layer of transformers as the MTP layer, one document at a time.

The completions are fixed, so nothing is sampled. Only the layer has gradients.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.parity.method_cases import harness, policies

DEPTHS, DECAY = 3, 0.8


def draft(alpha: float = 1.0, draft_vocab_size: int = harness.VOCAB) -> dict[str, float]:
    """Compare the loss, the divergences, and the gradients of the layer.

    Args:
        alpha: weight of the divergence.
        draft_vocab_size: number of predicted tokens.
    """
    import torch
    from ed_trainers import arguments_class, trainer_class
    from safetensors.torch import load_file
    from torch.nn.functional import log_softmax
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

    documents = policies.completed(0)
    learner = build_learner()
    options: Any = arguments_class("draft")
    trainer: Any = trainer_class("draft")(
        options(
            total_batch_size=6,
            max_prompt_length=policies.PROMPT,
            max_completion_length=policies.COMPLETION,
            num_speculative_tokens=DEPTHS,
            depth_decay=DECAY,
            alpha=alpha,
            draft_vocab_size=draft_vocab_size,
        ),
        learner,
        rollout=policies.FixedRollout([document.answer for document in documents]),
    )
    prompts: Any = SimpleNamespace(input_ids=[document.prompt for document in documents])
    ours = harness.our_outcome(trainer, prompts)
    others = [g for name, g in ours.gradients.items() if not name.startswith("mtp.")]
    assert others and not any(np.any(gradient) for gradient in others)
    gradients = {n: g for n, g in ours.gradients.items() if n.startswith("mtp.")}

    with tempfile.TemporaryDirectory() as directory:
        learner.save_pretrained(directory)
        tensors = load_file(Path(directory) / "model.safetensors")
    model = harness.hf_model(harness.folder(0)).double()
    model.config._attn_implementation = "eager"
    d, eps = model.config.hidden_size, model.config.rms_norm_eps
    layer: Any = torch.nn.Module()
    layer.fc = torch.nn.Linear(2 * d, d, bias=False)
    layer.pre_fc_norm_embedding, layer.pre_fc_norm_hidden, layer.norm = (
        LlamaRMSNorm(d, eps) for _ in range(3)
    )
    layer.layers = torch.nn.ModuleList([LlamaDecoderLayer(model.config, 0)])
    names = [name for name in tensors if name.startswith("mtp.")]
    layer.load_state_dict({name.removeprefix("mtp."): tensors[name] for name in names})
    layer.double()

    sums = torch.zeros(DEPTHS, 2, dtype=torch.float64)
    counts = 0
    head = model.lm_head.weight[:draft_vocab_size].detach()
    for document in documents:
        ids = torch.tensor([document.prompt + document.answer])
        length = ids.shape[1]
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            goal = log_softmax(hidden[0, 1:] @ head.T, dim=-1)
            embeds = model.model.embed_tokens(torch.cat([ids[:, 1:], ids[:, :1]], dim=1))
            factors = model.model.rotary_emb(hidden, torch.arange(length)[None])
        mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        # A draft starts at each position i whose token i + 2 is of the answer. Its pairs replace
        # those of the row, and no pair attends to later ones.
        starts = range(len(document.prompt) - 2, length - 2)
        for start in starts:
            chain = hidden
            for depth in range(min(DEPTHS, length - 2 - start)):
                place = start + depth
                pair = layer.pre_fc_norm_embedding(embeds), layer.pre_fc_norm_hidden(chain)
                x = layer.fc(torch.cat(pair, dim=-1))
                x = layer.layers[0](x, attention_mask=mask, position_embeddings=factors)
                state = layer.norm(x[0] if isinstance(x, tuple) else x)
                scores = log_softmax(state[0, place] @ head.T, dim=-1)
                target = int(ids[0, place + 2])
                divergence = (goal[place].exp() * (goal[place] - scores)).sum()
                nll = -scores[target] if target < draft_vocab_size else divergence * 0
                sums[depth, 0] = sums[depth, 0] + divergence
                sums[depth, 1] = sums[depth, 1] + alpha * divergence + (1 - alpha) * nll
                parts = chain[:, : place + 1], state[:, place : place + 1], chain[:, place + 2 :]
                chain = torch.cat(parts, dim=1)
        counts = counts + np.array([max(len(starts) - depth, 0) for depth in range(DEPTHS)])
    decay = DECAY ** np.arange(DEPTHS)
    loss = (sums[:, 1] * torch.tensor(decay)).sum() / float((decay * counts).sum())
    metrics = {f"divergence_{j + 1}": sums[j, 0].detach() / counts[j] for j in range(DEPTHS)}
    theirs = harness.their_outcome(layer, loss, metrics)
    theirs = harness.Outcome(
        theirs.loss, theirs.metrics, {f"mtp.{name}": g for name, g in theirs.gradients.items()}
    )
    return harness.errors(harness.Outcome(ours.loss, ours.metrics, gradients), theirs)


def build_learner() -> Any:
    """Load the tiny model with a new MTP layer in float32."""
    import jax.numpy as jnp
    from ed_models.families.llama import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(
        harness.folder(0),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        config_kwargs={"mtp_head": "new"},
    )


_LAYER = "a Llama layer of `transformers` as the MTP layer, in float64"
CASES = {
    "draft": harness.Case(_LAYER, draft),
    "draft with cross-entropy, half the vocabulary": harness.Case(
        _LAYER, partial(draft, alpha=0.6, draft_vocab_size=harness.VOCAB // 2)
    ),
}
