"""The conformance suite: checks that every model family must pass on tiny configurations.

A family lists its configurations in the class with the head (`CONFORMANCE`). A test file of any
package can then run the suite:

    import pytest
    from ed_models.conformance import CHECKS, Subject, subjects

    @pytest.mark.parametrize("check", CHECKS)
    @pytest.mark.parametrize("subject", subjects("my_model"), ids=str)
    def test_conformance(subject: Subject, check: str) -> None:
        CHECKS[check](subject)

A check returns the largest error, and raises AssertionError if the error exceeds the bound. The
checks against Hugging Face need torch and a model type of `transformers`; the other checks use
random weights. Several checks need eight devices (simulated devices are sufficient).

Legend: b rows, s positions, v vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import parameter_names
from ed_infra.testing import require_torch
from ed_layers.cache import RaggedBatch
from flax import nnx

from ed_models.checkpoints.loading import weight_map
from ed_models.subjects import ONE as ONE
from ed_models.subjects import PAD, B, S, forward, torch_logits
from ed_models.subjects import TINY as TINY
from ed_models.subjects import Subject as Subject
from ed_models.subjects import subjects as subjects

OURS = 2e-5  # the same numbers by another program of ours
GRADIENTS = 1e-3  # relative to the largest entry
MESHES = ((1, 8, 1, 1, 1), (2, 2, 1, 2, 1), (1, 1, 2, 2, 2))


def parity(subject: Subject) -> float:
    """Compare the logits of left-padded rows with Hugging Face's."""
    ours = forward(subject.model, input_ids=subject.ids, attention_mask=subject.mask).logits
    real = subject.mask != 0
    return _near(np.asarray(ours)[real], subject.torch_logits[real], subject.bound, "logits")


def gradients(subject: Subject) -> float:
    """Compare the loss and the gradients of every parameter with Hugging Face's."""
    torch = require_torch()
    from transformers.core_model_loading import revert_weight_conversion

    model = subject.torch_model
    ids = torch.tensor(subject.ids, dtype=torch.long)
    theirs = model(input_ids=ids, labels=ids, use_cache=False).loss
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(theirs, list(params.values()), allow_unused=True)
    grads = {n: g for n, g in zip(params, found, strict=True) if g is not None}
    # Experts have tensors of their own in the checkpoint, and one for all in the module.
    grads = revert_weight_conversion(model, grads)
    graphdef, params, other = subject.model.split_module()

    def loss(params: Any) -> jax.Array:
        return nnx.merge(graphdef, params, other).compute_loss(subject.ids)[0].loss

    ours, ours_grads = jax.jit(jax.value_and_grad(loss))(params)
    worst = _near(np.asarray(ours), theirs.detach().numpy(), subject.bound, "the loss")
    by_name = _per_layer(ours_grads)
    table = weight_map(subject.module_class, ours_grads, subject.model.config)
    # Some vanish in exact arithmetic, as of the bias of keys without positions: what is left of
    # them is rounding, of the size of float32's epsilon beside the largest.
    largest = max(float(g.abs().max()) for g in grads.values())
    least = float(np.finfo(np.float32).eps) * largest / GRADIENTS
    for name in table.hf_shapes:
        # Torch has no gradient for what only chooses, such as an index of keys: neither have we.
        expected = grads[name].numpy() if name in grads else np.zeros(table.hf_shapes[name])
        got = table.save(name, lambda ours, at: by_name[ours][at])
        scale = max(float(np.abs(expected).max()), least)
        worst = max(worst, _near(got / scale, expected / scale, GRADIENTS, f"gradient of {name}"))
    return worst


def generation(subject: Subject) -> float:
    """Compare 32 greedy tokens from padded rows with Hugging Face's."""
    make, theirs = subject.torch_model.generate, []
    for row in subject.torch_inputs():
        out = make(**row, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
        theirs += list(out.numpy()[:, -32:])
    ours = subject.model.generate(
        subject.ids, attention_mask=subject.mask, max_new_tokens=32, eos_token_id=[]
    )
    # min_new_tokens bars the end token there; a row is compared up to where we take it.
    for row, (got, expected) in enumerate(zip(ours.sequences[:, S:], theirs, strict=True)):
        ends = np.flatnonzero(got == subject.fields["eos_token_id"])
        n = ends[0] if len(ends) else len(got)
        assert (got[:n] == expected[:n]).all(), f"row {row}: {got[:n]} is not {expected[:n]}"
    return 0.0


def cache(subject: Subject) -> float:
    """Compare a contiguous cache, filled in steps, with a forward pass without a cache."""
    model, at, parts = subject.model, 0, []
    filled: Any = model.init_cache(B, 32)
    for n in (11, 1, 1, 11):  # the first and the last one share a program
        out = forward(model, input_ids=subject.ids[:, at : at + n], past_key_values=filled)
        filled, at = out.past_key_values, at + n
        parts.append(np.asarray(out.logits))
    return _near(np.concatenate(parts, axis=1), subject.logits, OURS, "logits")


def pages(subject: Subject) -> float:
    """Compare flat batches over pages, with prompt chunks and single tokens, with one forward."""
    model, page, width = subject.model, 4, 8
    filled: Any = model.init_paged_cache(B * width + 1, page, num_states=B)
    table = np.random.default_rng(1).permutation(B * width).reshape(B, width)
    done, got = np.zeros(B, int), [[] for _ in range(B)]
    for counts in ([9, 1, 4, 3], [1, 12, 20, 1], [14, 11, 0, 20]):
        places = [np.arange(done[row], done[row] + n) for row, n in enumerate(counts)]
        ids = [subject.ids[row, at] for row, at in enumerate(places)]
        slots = [table[row, at // page] * page + at % page for row, at in enumerate(places)]
        done, ends = done + counts, np.cumsum([0, *counts])
        pad = 48 - ends[-1]
        ragged = RaggedBatch(
            cu_q_lens=jnp.asarray(ends, jnp.int32),
            kv_lens=jnp.asarray(done, jnp.int32),
            seq_of_token=jnp.asarray(np.repeat([*range(B), 0], [*counts, pad]), jnp.int32),
            slots={"full": jnp.asarray(np.r_[*slots, [10**6] * pad], jnp.int32)},
            page_table={"full": jnp.asarray(table, jnp.int32)},
            state_slots=jnp.arange(B, dtype=jnp.int32),
            num_seqs=jnp.asarray(B, jnp.int32),
            prompt_lens=jnp.full(B, S, jnp.int32),
        )
        flat = np.concatenate([*ids, np.zeros(pad, np.int32)])[None]
        out = forward(model, input_ids=flat, past_key_values=filled, ragged=ragged)
        filled = out.past_key_values
        for row in range(B):
            got[row].append(np.asarray(out.logits)[0, ends[row] : ends[row + 1]])
    return max(
        _near(np.concatenate(got[row]), subject.logits[row], OURS, f"logits of row {row}")
        for row in range(B)
    )


def packed(subject: Subject) -> float:
    """Compare a packed row of several documents with each document alone."""
    ids, lengths = subject.ids.reshape(1, -1)[:, :48], (11, 20, 14)
    segments = np.repeat([1, 2, 3, 0], [*lengths, 48 - sum(lengths)])[None].astype(np.int32)
    got = np.asarray(forward(subject.model, input_ids=ids, segment_ids=segments).logits)
    worst = 0.0
    for segment in (1, 2, 3):
        at = np.flatnonzero(segments[0] == segment)
        alone = forward(subject.model, input_ids=ids[:, at]).logits
        worst = max(
            worst, _near(got[0, at], np.asarray(alone)[0], OURS, f"logits of document {segment}")
        )
    return worst


def padding(subject: Subject) -> float:
    """Compare a left-padded row with the row alone, with and without a cache."""
    model, row, worst = subject.model, 3, 0.0
    alone = forward(model, input_ids=subject.ids[row : row + 1, PAD[row] :]).logits
    for filled in (None, model.init_cache(B, 32)):
        out = forward(
            model, input_ids=subject.ids, attention_mask=subject.mask, past_key_values=filled
        )
        worst = max(
            worst,
            _near(
                np.asarray(out.logits)[row, PAD[row] :], alone[0], OURS, "logits of the padded row"
            ),
        )
    return worst


def layouts(subject: Subject) -> float:
    """Compare unrolled layers with scanned layers."""
    other = subject.load(scan_layers=subject.model.layout == "leaves")
    return _near(
        np.asarray(forward(other, input_ids=subject.ids).logits), subject.logits, OURS, "logits"
    )


def meshes(subject: Subject) -> float:
    """Compare three meshes of eight devices with one device."""
    worst = 0.0
    for dims in MESHES:
        model = subject.load(dims)
        got = np.asarray(forward(model, input_ids=subject.ids).logits)
        worst = max(worst, _near(got, subject.logits, OURS, f"logits on mesh {dims}"))
    return worst


def saved(subject: Subject) -> float:
    """Load a saved model in Hugging Face: bitwise equal tensors, none missing or unexpected."""
    require_torch()
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        again, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    missing = [name for name in report.pop("missing_keys") if not subject.ignores(name)]
    assert not any([missing, *report.values()]), (missing, report)
    theirs = again.state_dict()
    for name, value in subject.torch_model.state_dict().items():
        np.testing.assert_array_equal(theirs[name].numpy(), value.numpy(), err_msg=name)
    got = torch_logits(subject, again.eval())
    real = subject.mask != 0
    return _near(got[real], subject.torch_logits[real], 0.0, "logits of the saved model")


Check = Callable[[Subject], float]

#: Checks that need torch and a model type of `transformers`.
AGAINST_TORCH: Mapping[str, Check] = {
    "parity": parity,
    "gradients": gradients,
    "generation": generation,
    "saved": saved,
}
CHECKS: Mapping[str, Check] = {
    **AGAINST_TORCH,
    "cache": cache,
    "pages": pages,
    "packed": packed,
    "padding": padding,
    "layouts": layouts,
    "meshes": meshes,
}
#: Fast checks, which the default test run executes for every family.
FAST = ("parity", "cache")


def _near(got: np.ndarray, expected: Any, bound: float, what: str) -> float:
    """Return the largest difference.

    Raises:
        AssertionError: The shapes differ, or the difference exceeds the bound.
    """
    shapes = np.shape(got), np.shape(expected)
    assert shapes[0] == shapes[1], f"{what}: the shape is {shapes[0]} and should be {shapes[1]}"
    error = float(np.abs(got - np.asarray(expected)).max())
    assert error <= bound, (
        f"{what}: the largest difference is {error:.2e}, above the bound of {bound:.0e}"
    )
    return error


def _per_layer(state: nnx.State) -> dict[str, np.ndarray]:
    """Return the arrays of a state by canonical name."""
    arrays: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(state):
        value = np.asarray(variable.get_value())
        names = parameter_names.canonical(path)
        arrays |= dict(
            zip(names, value if parameter_names.is_stacked(path) else [value], strict=True)
        )
    return arrays
