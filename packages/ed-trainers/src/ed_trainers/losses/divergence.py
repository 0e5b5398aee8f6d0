"""How far a student's next-token distribution is from a teacher's, in chunks: never full logits.

The logits of both exist for one chunk of tokens at a time; the backward pass makes them again. As
in `token_loss`, each device walks over its own tokens; the vocabulary stays with the compiler.

Memory in addition to hidden states and heads: a few arrays [c, v] in float32, and the gradient of
the student's head, [d, v]; nothing grows with both the tokens of a batch and the vocabulary.

Legend: b rows, s positions, d hidden of the student, t hidden of the teacher, c tokens of a chunk.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput
from ed_layers.losses import split_chunks, target_logit
from ed_layers.projections.head import Head
from ed_models.protocol import LanguageModel
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ed_trainers.contract import Batch
from ed_trainers.losses.scoring import forward
from ed_trainers.losses.token_loss import by_device
from ed_trainers.options.online import Support
from ed_trainers.placement import Placement

# Several arrays of [c, v] exist at the same time.
_DEFAULT_CHUNK = 256
# TRL's constant: keeps the logarithm of the tail finite.
_SMALLEST_TAIL = 1e-7


def token_divergences(
    student: tuple[Float[Array, "b s d"], Head],
    teacher: tuple[Float[Array, "b s t"], Head],
    targets: Int[Array, "b s"],
    *,
    sharding: NamedSharding,
    beta: float,
    temperature: float,
    chunk: int | None = None,
    support: Support | None = None,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Divergence of both distributions at each position, and the student's log-probabilities.

    Generalized Jensen-Shannon divergence (Agarwal et al., arXiv:2306.13649, eq. 1): with m the
    mixture `beta * teacher + (1 - beta) * student`, `beta * KL(teacher || m) + (1 - beta) *
    KL(student || m)`; at its ends the forward divergence `KL(teacher || student)` (beta 0) and the
    reverse one (beta 1).

    Args:
        student: hidden states after the last norm, and the head; gradients go here.
        teacher: the same of the teacher, of the same vocabulary.
        targets: token ids in [0, v).
        sharding: of `targets`; its mesh axes are those that tokens are split over.
        beta: 0 to 1.
        temperature: both logits are divided by it, for the divergence alone.
        chunk: number of tokens whose logits exist at the same time on a device.
        support: the tokens that are compared; None: the vocabulary.

    Returns:
        `(divergence, logp)` in nats, float32, sharded as the targets are; `logp` of each target at
        temperature 1.
    """

    def local(
        student: jax.Array,
        student_head: Head,
        teacher: jax.Array,
        teacher_head: Head,
        targets: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        size = chunk or _DEFAULT_CHUNK

        @jax.checkpoint
        def compute_chunk(carry: None, part: tuple[jax.Array, ...]):
            hidden, hidden_of_teacher, target = part
            logits = student_head(hidden)
            logp = target_logit(jax.nn.log_softmax(logits, axis=-1), target)
            log_q = jax.nn.log_softmax(logits / temperature, axis=-1)
            log_p = jax.nn.log_softmax(teacher_head(hidden_of_teacher) / temperature, axis=-1)
            if support is not None:
                log_q, log_p = restrict_logps(log_q, log_p, support)
            return carry, (_divergence(log_q, log_p, beta), logp)

        flat = (x.reshape(-1, x.shape[-1]) for x in (student, teacher))
        parts = tuple(split_chunks(x, size) for x in (*flat, targets.reshape(-1)))
        _, chunk_outputs = jax.lax.scan(compute_chunk, None, parts)
        count = targets.size
        divergence, logp = (x.reshape(-1)[:count].reshape(targets.shape) for x in chunk_outputs)
        return divergence, logp

    spec, replicated_spec = sharding.spec, PartitionSpec()
    run = by_device(local, sharding, (spec, replicated_spec, spec, replicated_spec, spec), spec)
    frozen = jax.lax.stop_gradient(teacher)
    return run(*student, *frozen, targets)


def compare_models(
    student: LanguageModel,
    teacher: LanguageModel,
    batch: Batch,
    key: jax.Array | None,
    *,
    placement: Placement,
    beta: float,
    temperature: float,
    chunk: int | None,
    support: Support | None = None,
    noise: float | None = None,
    hidden_states: bool = False,
) -> tuple[CausalLMOutput, CausalLMOutput, Float[Array, "b s"], Float[Array, "b s"]]:
    """Run both models over a batch; see `token_divergences`.

    Args:
        batch: `input_ids`, `segment_ids`, `position_ids`, `targets` [b, s].
        key: dropout key of the student.
        placement: the distribution of tokens over devices.
        noise: on the student's embeddings alone; see `scoring.build_noise_inputs`.
        hidden_states: the outputs also have the input of every layer.

    Returns:
        the outputs of student and teacher, the divergence at each position, and the student's
        log-probability of each target.

    Raises:
        ConfigError: the vocabularies differ.
    """
    output = forward(student, batch, key, hidden_states=hidden_states, noise=noise)
    teacher_output = forward(teacher, batch, None, hidden_states=hidden_states)
    assert output.last_hidden_state is not None
    assert teacher_output.last_hidden_state is not None
    student_head, teacher_head = student.head(), teacher.head()
    if student_head.vocab_size != teacher_head.vocab_size:
        raise ConfigError(
            f"the teacher has {teacher_head.vocab_size} tokens, the student "
            f"{student_head.vocab_size}: their "
            "distributions are compared token by token, so both need one tokenizer"
        )
    targets = batch["targets"]
    divergence, logp = token_divergences(
        (output.last_hidden_state, student_head),
        (teacher_output.last_hidden_state, teacher_head),
        targets,
        sharding=placement.sharding(targets.shape),
        beta=beta,
        temperature=temperature,
        chunk=chunk,
        support=support,
    )
    return output, teacher_output, divergence, logp


def restrict_logps(
    log_q: Float[Array, "c v"], log_p: Float[Array, "c v"], support: Support
) -> tuple[Float[Array, "c k"], Float[Array, "c k"]]:
    """Return the log-probabilities of student q and teacher p on the tokens of a support.

    The tokens are the most probable ones of one model, the same for both models.
    """
    ranked = log_q if support.from_student else log_p
    _, tokens = jax.lax.top_k(jax.lax.stop_gradient(ranked), min(support.top_k, ranked.shape[-1]))
    top_logps = [jnp.take_along_axis(x, tokens, axis=-1) for x in (log_q, log_p)]
    if not support.add_tail:
        student_logps, teacher_logps = (
            x - jax.nn.logsumexp(x, axis=-1, keepdims=True) for x in top_logps
        )
    else:
        student_logps, teacher_logps = (jnp.concatenate([x, _tail(x)], axis=-1) for x in top_logps)
    return student_logps, teacher_logps


def _tail(logps: Float[Array, "c k"]) -> Float[Array, "c 1"]:
    """Return the logarithm of the probability that is missing to 1, at least TRL's 1e-7."""
    total = jnp.minimum(jax.nn.logsumexp(logps, axis=-1, keepdims=True), -_SMALLEST_TAIL)
    return jnp.log(-jnp.expm1(total))


def _divergence(
    log_q: Float[Array, "c v"], log_p: Float[Array, "c v"], beta: float
) -> Float[Array, " c"]:
    """Of student q and teacher p, summed over the vocabulary."""
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    mixture = jnp.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    return beta * _kl(log_p, mixture) + (1 - beta) * _kl(log_q, mixture)


def _kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)
