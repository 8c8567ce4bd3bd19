"""What holds of a model of any family, in the pieces that the tests of a family assert."""

import jax.numpy as jnp
import numpy as np

import ling3
from ling3 import train


def prompts(*lengths):
    """Prompts of these lengths, of ids from 3 to 63: the same ones every time."""
    draw = np.random.default_rng(0)
    return [draw.integers(3, 64, size=length).tolist() for length in lengths]


def answers_in_company_and_alone(model, prompts, params, **changes):
    """Tokens and log-probabilities of requests in an engine that preempts some of them, and of each served alone.

    Then the longest prompt twice more, where its prefix is known; alone nothing is. Prompt and answer are at most 40
    tokens together. `changes` are of the engines' settings.
    """
    engine, cold = (
        ling3.Engine(
            model,
            max_running_requests=3,
            num_pages=6,
            page_size=8,
            chunked_prefill_size=8,
            token_paddings=(8,),
            decode_rows=3,
            decode_steps=2,
            max_model_len=40,
            prefix_cache=cached,
            **changes,
        )
        for cached in (True, False)
    )
    crowd = engine.generate(prompts, params)
    assert engine.stats().preemptions, "all requests fit into the pages at once"
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    again = [engine.generate([prompts[longest]], params[longest])[0] for _ in range(2)]
    assert again[1].cached_tokens >= 8, "its prefix is not known"
    alone = [cold.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    alone += [alone[longest]] * 2
    return tuple([(output.token_ids, output.logprobs) for output in outputs] for outputs in (crowd + again, alone))


def losses_of_training(model, tokens):
    """The losses of six steps on one batch."""
    tokens, losses = jnp.asarray(tokens, jnp.int32), []
    train.train(
        model,
        [train.Batch(tokens, jnp.ones(tokens.shape))] * 6,
        train.Optimization(steps=6, learning_rate=1e-2, warmup=1),
        every=1,
        report=lambda point, _: losses.append(point.loss),
    )
    return losses
