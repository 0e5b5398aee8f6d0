"""Engine, trainer and lm-eval's adapter compute the same log-probability of a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_data.tokens.bpe import train_bpe
from ed_esurge import SamplingParams, eSurge
from ed_esurge.lm_eval import eSurgeLM
from ed_infra.testing import english_topics, tiny_llama
from ed_models import AutoEasyDeLConfig, AutoEasyDeLModelForCausalLM
from ed_trainers import Models, SFTArguments, SFTTrainer
from flax import nnx

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    texts = list(english_topics().values())[:20]
    tokenizer = train_bpe(texts, vocab_size=300)
    config = AutoEasyDeLConfig.for_model(
        **tiny_llama(vocab_size=len(tokenizer), initializer_range=0.1),
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model = AutoEasyDeLModelForCausalLM.from_config(
        config, dtype=jnp.float32, param_dtype=jnp.float32
    )
    engine = eSurge(model, tokenizer, max_model_len=256, max_num_seqs=4, page_size=16)
    trainer = SFTTrainer(
        SFTArguments(save_directory=str(tmp_path_factory.mktemp("run")), max_training_steps=1),
        model=model,
        train_dataset=iter(()),
    )
    yield model, tokenizer, engine, trainer, texts[3][:300]
    engine.terminate()


@pytest.mark.nightly
def test_engine_trainer_and_lm_eval_agree_on_every_token(parts, record_property):
    model, tokenizer, engine, trainer, text = parts
    ids = tokenizer(text)["input_ids"][:100]

    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (output,) = engine.generate([ids], sampling)
    entries = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    served = np.asarray([entry[token].logprob for token, entry in entries])

    # The loss function and lm-eval return sums, so each call has one token.
    graphdef, state = nnx.split(model)

    @jax.jit
    def loss(batch):
        models = Models(nnx.merge(graphdef, state))
        return trainer.loss(models, batch, None).sums["main_loss"].sum

    trained = []
    for at in range(1, len(ids)):
        labels = np.full((1, len(ids)), -100, np.int32)
        labels[0, at] = ids[at]
        batch = {"input_ids": np.asarray([ids], np.int32), "labels": labels}
        trained.append(-float(loss(trainer.prepare(batch))))

    requests = [(None, ids[:n], ids[n : n + 1]) for n in range(1, len(ids))]
    judged = [score for score, _ in eSurgeLM(engine)._loglikelihood_tokens(requests)]

    worst = {
        "engine - trainer": np.abs(served - trained).max(),
        "engine - lm-eval": np.abs(served - judged).max(),
    }
    figures = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
    record_property("summary", f"log-probabilities of {len(ids) - 1} tokens, largest: {figures}")
    assert max(worst.values()) <= TOLERANCE, figures
