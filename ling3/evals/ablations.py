"""A table of ablations: each cut from the same model, and asked the same questions.

What is measured of each, beside the whole model:

    perplexity   exp of the mean -ln p of the worked solutions' tokens, given their questions (or of a text's tokens)
    problems     the share of held-out word problems answered with the right number, asked alone
    recall       the same at the end of a long context: after so many worked examples of other problems

The examples before a question are noise: the numbers to be recalled are the question's own, which a layer has to keep
apart from hundreds of others.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ling3 import ablate
from ling3.evals.ablation_report import Report, Row
from ling3.evals.perplexity import log_likelihood, perplexity
from ling3.evals.run import Score
from ling3.model import Ling3ForCausalLM
from ling3.params import SamplingParams
from ling3.problems import Problem, ask, last_number, problems
from ling3.progress import progress
from ling3.serve import Engine
from ling3.tokenizer import Tokenizer

Suite = Literal["gates", "decay", "memory", "layers", "experts", "all"]

HELD_OUT_SEED, EXAMPLES_SEED, CALIBRATION_SEED = 2026, 2027, 2028
"""The problems asked (as in nano's examination), those shown before them, and those that gates are averaged over."""
SCORED = 64
"""How many solutions the perplexity is taken over; how many problems the gates' means are taken over."""


@dataclasses.dataclass(frozen=True)
class Ablation:
    """One line of the table: what is cut, in which suite, and what the formula then says."""

    name: str
    suite: Suite
    formula: str
    cut: Callable[[Ling3ForCausalLM, Int32[Array, "batch seq"]], Ling3ForCausalLM]
    """From a model, and the tokens that means are taken over, to the model without it."""


def ablations(model: Ling3ForCausalLM, suite: Suite = "all") -> list[Ablation]:
    """The ablations of `suite` that this model has the parts for."""
    config = model.config
    kinds = [config.attention_kind(i) for i in range(config.num_hidden_layers)]
    found: list[Ablation] = []

    def add(name: str, of: Suite, formula: str, cut: Callable[..., Ling3ForCausalLM]) -> None:
        if suite in (of, "all"):
            found.append(Ablation(name, of, formula, cut))

    if "kda" in kinds:
        add("KDA: no output gate", "gates", "y = o_proj(RMSNorm(o))", lambda m, t: ablate.no_output_gate(m, "kda"))
        add(
            "KDA: gate at its mean",
            "gates",
            "sigmoid(g) → its mean",
            lambda m, t: ablate.mean_output_gate(m, t, "kda"),
        )
    if "mla" in kinds:
        add("MLA: no output gate", "gates", "y = dense(o)", lambda m, t: ablate.no_output_gate(m, "mla"))
        add(
            "MLA: gate at its mean",
            "gates",
            "sigmoid(g) → its mean",
            lambda m, t: ablate.mean_output_gate(m, t, "mla"),
        )
    if "kda" in kinds:
        for bound in (-10.0, -2.5, -1.0, -0.1):
            formula = f"g = {bound:g} · sigmoid(…)"
            add(f"KDA: lower_bound {bound:g}", "decay", formula, lambda m, t, bound=bound: ablate.lower_bound(m, bound))
        add("KDA: softplus law", "decay", "g = -exp(A_log) · softplus(…)", lambda m, t: ablate.lower_bound(m, None))
        add("KDA: no decay", "decay", "g = 0", lambda m, t: ablate.no_decay(m))
        add("KDA: beta 1", "memory", "b = 1", lambda m, t: ablate.fixed_beta(m, 1.0))
        add("KDA: beta 1/2", "memory", "b = 1/2", lambda m, t: ablate.fixed_beta(m, 0.5))
        add("KDA: no short convolution", "memory", "q, k, v = silu(W x)", lambda m, t: ablate.no_short_conv(m))
    if "mla" in kinds:
        add("MLA: no RoPE", "memory", "rope(x) → x", lambda m, t: ablate.no_rope(m))
    for i, kind in enumerate(kinds):
        if kind != "none":
            name = f"layer {i}: no {kind.upper()}"
            add(name, "layers", "h = x", lambda m, t, i=i: ablate.no_attention(m, [i]))
    sparse = [i for i in range(config.num_hidden_layers) if config.mlp_kind(i) == "moe"]
    if sparse:
        if config.num_experts_per_tok > 1:
            half = config.num_experts_per_tok // 2
            add(f"experts: top {half}", "experts", f"top_k = {half}", lambda m, t: ablate.top_k(m, half))
        if config.moe_router_enable_expert_bias:
            add("experts: no routing bias", "experts", "c = s", lambda m, t: ablate.no_routing_bias(m))
        if config.num_shared_experts:
            add("experts: no shared one", "experts", "y = Σ w_e · expert_e(x)", lambda m, t: ablate.no_shared_expert(m))
        size = config.num_experts // config.n_group
        one_each = list(range(0, config.num_experts, size))
        if (size - 1) * config.topk_group >= config.num_experts_per_tok:
            name = f"experts: {len(one_each)} of {config.num_experts} dropped"
            add(name, "experts", "c = s - 10,000 for one of each group", lambda m, t: ablate.drop_experts(m, one_each))
    return found


def compare(
    model: Ling3ForCausalLM,
    tokenizer: Tokenizer,
    chosen: Sequence[Ablation],
    *,
    questions: int = 200,
    recalls: int = 50,
    examples: int = 20,
    text: str | None = None,
    report: Callable[[Row], None] = lambda row: None,
) -> Report:
    """The table: the whole model first, then each of the `chosen`, every one on an engine of its own.

    `questions` problems are asked alone and the first `recalls` of them after `examples` worked ones, all in one batch;
    the perplexity is that of `text`, or of solutions. `report` is called with each row as it is measured. Raises
    ValueError where the examples do not fit into the model's context.
    """
    if recalls > questions:
        raise ValueError(f"recalls is {recalls}, expected at most the number of questions, {questions}")
    asked = list(itertools.islice(problems(HELD_OUT_SEED, "held_out"), questions))
    shown = problems(EXAMPLES_SEED, "train")
    prompts = [tokenizer.encode(ask(problem)) for problem in asked]
    prompts += [tokenizer.encode(ask(problem, list(itertools.islice(shown, examples)))) for problem in asked[:recalls]]
    room = model.config.max_position_embeddings
    if (longest := max(map(len, prompts))) + ANSWER > room:
        raise ValueError(
            f"examples: {examples} of them make prompts of up to {longest} tokens, and with {ANSWER} for the answer "
            f"there is room for {room}: show fewer"
        )
    calibration = solution_rows(tokenizer, itertools.islice(problems(CALIBRATION_SEED, "train"), SCORED))[0]
    rows: list[Row] = []
    cuts = [("whole", "whole", "", model), *((a.name, a.suite, a.formula, a.cut) for a in chosen)]
    with progress("ablations", len(cuts)) as advance:
        for name, suite, formula, cut in cuts:
            variant = cut if isinstance(cut, Ling3ForCausalLM) else cut(model, calibration)
            cost = (
                solution_perplexity(variant, tokenizer)
                if text is None
                else perplexity(variant, tokenizer, text).perplexity
            )
            right = _right(variant, tokenizer, prompts, [*asked, *asked[:recalls]])
            row = Row(name, suite, formula, cost, _score(right[:questions]), _score(right[questions:]))
            rows.append(row)
            report(row)
            advance(1)
    lengths = [len(prompt) for prompt in prompts[questions:]]
    return Report(
        tuple(rows), "solutions" if text is None else "text", round(float(np.mean(lengths))) if lengths else 0
    )


ANSWER = 64
"""Tokens of an answer: the longest solution has 31 in nano's tokens."""


def solution_perplexity(model: Ling3ForCausalLM, tokenizer: Tokenizer) -> float:
    """exp of the mean -ln p of the first held-out problems' solution tokens, given what stands before them."""
    tokens, learned = solution_rows(tokenizer, itertools.islice(problems(HELD_OUT_SEED, "held_out"), SCORED))
    scores = np.asarray(_likelihoods(model, tokens), np.float64)
    return float(np.exp(-np.mean(scores[np.asarray(learned)[:, 1:]])))


@eqx.filter_jit
def _likelihoods(model: Ling3ForCausalLM, tokens: Int32[Array, "batch seq"]) -> Float32[Array, "batch predicted"]:
    return log_likelihood(model(tokens)[:, :-1], tokens[:, 1:])


def solution_rows(
    tokenizer: Tokenizer, some: Iterable[Problem]
) -> tuple[Int32[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Problems with their solutions, padded on the right with zeros, and which tokens are the solutions'."""
    pairs = [(tokenizer.encode(ask(p)), tokenizer.encode(f" {p.solution}", add_special_tokens=False)) for p in some]
    width = max(len(prompt) + len(solution) for prompt, solution in pairs)
    tokens, learned = np.zeros((len(pairs), width), np.int32), np.zeros((len(pairs), width), bool)
    for row, (prompt, solution) in enumerate(pairs):
        tokens[row, : len(prompt) + len(solution)] = prompt + solution
        learned[row, len(prompt) : len(prompt) + len(solution)] = True
    return jnp.asarray(tokens), jnp.asarray(learned)


def _right(
    model: Ling3ForCausalLM, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], asked: Sequence[Problem]
) -> list[bool]:
    """Which greedy answers end on the right number."""
    longest = max(map(len, prompts)) + ANSWER
    engine = Engine(
        model,
        tokenizer,
        max_running_requests=16,
        max_model_len=longest,
        chunked_prefill_size=128,
        token_paddings=(128,),
    )
    outputs = engine.generate(prompts, SamplingParams(max_tokens=ANSWER))
    return [last_number(output.text) == problem.answer for output, problem in zip(outputs, asked, strict=True)]


def _score(right: Sequence[bool]) -> Score | None:
    return Score(sum(right), len(right)) if right else None
