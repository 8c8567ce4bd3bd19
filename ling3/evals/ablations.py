"""Compares ablations of one model, all on the same questions.

The measurements, which are made of the unchanged model too:

    perplexity   exp of the mean -ln p of the worked solutions' tokens, given their questions (or of a text's tokens)
    problems     the share of held-out word problems answered with the right number, asked alone
    recall       the same at the end of a long context, after worked examples of other problems

The examples are distractors: the answer depends on the question's own numbers, which the model has to keep apart from
those of the examples (twenty examples have over two hundred).
"""

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32
from rich.table import Table

from ling3.bench.report import check_plot, machine
from ling3.engine.sampling_params import SamplingParams
from ling3.evals.answers import last_number
from ling3.evals.perplexity import log_likelihood, perplexity
from ling3.evals.public import STOP
from ling3.evals.run import Score
from ling3.interpret import ablate
from ling3.model import CausalLM
from ling3.runtime.plots import BLUE, RED
from ling3.runtime.progress import progress
from ling3.serve import Engine
from ling3.text.tokenizer import Tokenizer
from ling3.train.nano.problems import Problem, ask, exam, problems, worked_examples


@dataclasses.dataclass(frozen=True)
class AblationRow:
    """One row of the table: an ablation and the ablated model's scores."""

    name: str
    suite: str
    formula: str
    perplexity: float
    problems: Score | None
    recall: Score | None


@dataclasses.dataclass(frozen=True)
class AblationReport:
    """A table of ablations, the unchanged model first; `print` it with rich, take `to_dict()`, or `plot` it."""

    rows: tuple[AblationRow, ...]
    scored: str
    """The text that the perplexity is computed on: `solutions` or `text`."""
    context: int
    """Mean length of the prompts of `recall`, in tokens."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON."""
        return {
            **self.about,
            "perplexity_of": self.scored,
            "recall_context_tokens": self.context,
            "machine": machine(),
            "rows": [
                {name: value.to_dict() if isinstance(value, Score) else value for name, value in vars(row).items()}
                for row in self.rows
            ],
        }

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("ablation")
        table.add_column("what the formula says")
        table.add_column(f"perplexity of {self.scored}", justify="right")
        table.add_column("problems", justify="right")
        table.add_column(f"in {self.context:,} tokens" if self.context else "in a long context", justify="right")
        suite = None
        for row in self.rows:
            if suite is not None and row.suite != suite:
                table.add_section()
            suite = row.suite
            cost = f"{row.perplexity:,.4g}" if row.perplexity < 1e6 else f"{row.perplexity:.1e}"
            table.add_row(row.name, row.formula, cost, *(_share(score) for score in (row.problems, row.recall)))
        return table

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws ln(perplexity) on a log scale, and both right answers in percent with 95 % intervals, a row each.

        Writes PNG, PDF or SVG. Raises ValueError for other file names (see `bench.report.check_plot`).
        """
        check_plot(path)
        from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

        height = 1.3 + 0.27 * len(self.rows)
        figure = Figure(figsize=(9.5, height), layout="constrained")
        cost, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.2))
        places = [-i for i in range(len(self.rows))]
        nats = [math.log(row.perplexity) for row in self.rows]
        cost.plot(nats, places, "o", color=BLUE)
        cost.axvline(nats[0], color="black", linestyle=":", linewidth=1)
        cost.set(xscale="log", xlabel=f"nats per token of {self.scored} (log scale)")
        cost.set_yticks(places, [row.name for row in self.rows])
        series = (
            ("problems", "asked alone", BLUE, "o", 0.12),
            ("recall", f"in {self.context:,} tokens", RED, "s", -0.12),
        )
        for name, label, colour, marker, shift in series:
            scores = {place + shift: getattr(row, name) for place, row in zip(places, self.rows, strict=True)}
            scores = {place: score for place, score in scores.items() if score is not None}
            shares = [100 * score.accuracy for score in scores.values()]
            reach = [[100 * abs(score.interval[side] - score.accuracy) for score in scores.values()] for side in (0, 1)]
            filled, at = "white" if marker == "s" else colour, list(scores)
            if scores:
                right.errorbar(shares, at, xerr=reach, fmt=marker, color=colour, mfc=filled, ms=5, lw=1.2, label=label)
        alone = 0 if self.rows[0].problems is None else 100 * self.rows[0].problems.accuracy
        right.axvline(alone, color="black", linestyle=":", linewidth=1)
        right.set(xlim=(-3, 103), xlabel="word problems answered right, %, with 95 % intervals")
        right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=True)
        right.set_ylim(places[-1] - 0.7, 1.4)
        for axes in (cost, right):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{self.about.get('model', 'A model')} with one mechanism cut out; dotted: the whole model")
        figure.savefig(pathlib.Path(path), dpi=160)


def _share(score: Score | None) -> str:
    if score is None:
        return "-"
    low, high = score.interval
    return f"{score.accuracy:.3f} ({low:.2f}-{high:.2f})"


Suite = Literal["gates", "decay", "memory", "layers", "experts", "all"]

CALIBRATION_SEED = 2028
"""The seed of the problems over which gates are averaged."""
SCORED = 64
"""The number of solutions in the perplexity, and of problems over which gates are averaged."""
ANSWER = 64
"""The most tokens of an answer; the longest solution has 31 of nano's tokens."""


class ProblemRows(NamedTuple):
    """Problems with their solutions, one per row, right-padded with zeros."""

    tokens: Int32[Array, "batch seq"]
    valid: Bool[Array, "batch seq"]  # False for padding
    learned: Bool[Array, "batch seq"]  # True for the solutions


@dataclasses.dataclass(frozen=True)
class Ablation:
    """An ablation: its name, suite and changed formula, and the function that applies it."""

    name: str
    suite: Suite
    formula: str
    cut: Callable[[CausalLM, ProblemRows], CausalLM]
    """`cut(model, rows)` returns the ablated model; mean gates are taken over `rows`."""


def ablations(model: CausalLM, suite: Suite = "all") -> list[Ablation]:
    """The ablations of `suite` for mechanisms that this model has, without those that are cut already."""
    found: list[Ablation] = []

    def having(mechanism: str, law: Callable[[Any], bool] = lambda module: True) -> dict[str, dict[int, Any]]:
        """The modules that have the mechanism and satisfy `law`, by class name, then by layer."""
        kinds: dict[str, dict[int, Any]] = {}
        for i, module in ablate.having(model, mechanism, uncut=True).items():
            if law(module):
                kinds.setdefault(type(module).__name__, {})[i] = module
        return kinds

    def add(name: str, of: Suite, formula: str, layers: Iterable[int], function: Callable, *given: Any) -> None:
        at = list(layers)

        def cut(model: CausalLM, rows: ProblemRows) -> CausalLM:
            means = {"tokens": rows.tokens, "valid": rows.valid} if function is ablate.mean_output_gate else {}
            return function(model, *given, layers=at, **means)

        if suite in (of, "all") and at:
            found.append(Ablation(name, of, formula, cut))

    for kind, gated in having("output gate", lambda m: getattr(m, "gate_law", None) == "sigmoid").items():
        normed = all(hasattr(module, "o_norm") for module in gated.values())
        output = "o_proj(RMSNorm(o))" if normed else "dense(o)"
        add(f"{kind}: no output gate", "gates", f"y = {output}", gated, ablate.no_output_gate)
        add(f"{kind}: gate at its mean", "gates", "sigmoid(g) → its mean", gated, ablate.mean_output_gate)
    for kind, decaying in having("decay").items():
        bounds = {i: module.lower_bound for i, module in decaying.items() if hasattr(module, "lower_bound")}
        for bound in (-10.0, -2.5, -1.0, -0.1):
            others, law = [i for i in bounds if bounds[i] != bound], f"g = {bound:g} · sigmoid(…)"
            add(f"{kind}: lower_bound {bound:g}", "decay", law, others, ablate.lower_bound, bound)
        others, law = [i for i in bounds if bounds[i] is not None], "g = -exp(A_log) · softplus(…)"
        add(f"{kind}: softplus law", "decay", law, others, ablate.lower_bound, None)
        add(f"{kind}: no decay", "decay", "g = 0", decaying, ablate.no_decay)
    for kind, learned in having("writing strength").items():
        for beta, text in ((1.0, "1"), (0.5, "1/2")):
            add(f"{kind}: beta {text}", "memory", f"b = {text}", learned, ablate.fixed_beta, beta)
    for kind, convolved in having("short convolution").items():
        add(f"{kind}: no short convolution", "memory", "q, k, v = silu(W x)", convolved, ablate.no_short_conv)
    for kind, rotated in having("rotary embedding").items():
        add(f"{kind}: no RoPE", "memory", "rope(x) → x", rotated, ablate.no_rope)
    for kind, normed in having("norms of q and k").items():
        add(f"{kind}: no norms of q and k", "memory", "RMSNorm(q), RMSNorm(k) → q, k", normed, ablate.no_qk_norm)
    for kind, sunk in having("attention sink").items():
        add(f"{kind}: no attention sink", "memory", "softmax([q·e …, sink]) → softmax([q·e …])", sunk, ablate.no_sink)
    for kind, compressed in having("compressed entries").items():
        add(f"{kind}: window only", "memory", "e over the last tokens", compressed, ablate.window_only)
        windowed = [i for i in compressed if compressed[i].sliding_window is not None]
        add(f"{kind}: compressed only", "memory", "e over compressed entries", windowed, ablate.compressed_only)
    for i, layer in ablate.having(model, "attention", uncut=True).items():
        add(f"layer {i}: no {type(layer.attention).__name__}", "layers", "h = x", [i], ablate.no_attention)

    routers = ablate.having(model, "experts per token")
    most = max((router.top_k for router in routers.values()), default=0)
    several = [i for i, router in routers.items() if router.top_k == most > 1]
    add(f"experts: top {most // 2}", "experts", f"top_k = {most // 2}", several, ablate.top_k, most // 2)
    biased = ablate.having(model, "routing bias")
    add(
        "experts: no routing bias",
        "experts",
        "c = s",
        ablate.having(model, "routing bias", uncut=True),
        ablate.no_routing_bias,
    )
    shared = ablate.having(model, "shared expert", uncut=True)
    add("experts: no shared one", "experts", "y = Σ w_e · expert_e(x)", shared, ablate.no_shared_expert)
    add("experts: none but the shared", "experts", "y = shared_experts(x)", shared, ablate.no_routed_experts)
    for router in [*biased.values()][:1]:
        experts = router.weight.shape[0]
        size = experts // router.groups
        each = list(range(0, experts, size))
        name, law = f"experts: {len(each)} of {experts} dropped", "c = s - 10,000 for one of each group"
        enough = (size - 1) * router.top_groups >= most
        add(name, "experts", law, biased if enough else [], ablate.drop_experts, each)
    return found


def compare(
    model: CausalLM,
    tokenizer: Tokenizer,
    chosen: Sequence[Ablation],
    *,
    questions: int = 200,
    recalls: int = 50,
    examples: int = 20,
    text: str | None = None,
    report: Callable[[AblationRow], None] = lambda row: None,
) -> AblationReport:
    """Measures the unchanged model, then each of the `chosen` ablations, each in a new engine.

    `questions` problems are asked alone, and the first `recalls` of them again after `examples` worked ones. The
    perplexity is of `text`, or by default of solutions. `report` is called with each row as it is measured. Raises
    ValueError if `recalls` exceeds `questions`, or if the examples do not fit into the model's context.
    """
    if recalls > questions:
        raise ValueError(f"recalls is {recalls}, expected at most the number of questions, {questions}")
    asked, shown = exam(questions), worked_examples(recalls, each=examples)
    texts = [ask(problem) for problem in asked] + [ask(*pair) for pair in zip(asked, shown)]
    prompts = [tokenizer.encode(text) for text in texts]
    room = model.config.max_position_embeddings
    if (longest := max(map(len, prompts))) + ANSWER > room:
        raise ValueError(
            f"examples: {examples} of them make prompts of up to {longest} tokens, and with {ANSWER} for the answer "
            f"there is room for {room}: show fewer"
        )
    calibration = solution_rows(tokenizer, itertools.islice(problems(CALIBRATION_SEED, "train"), SCORED))
    rows: list[AblationRow] = []
    variants = [("whole", "whole", "", model)]
    variants += [(a.name, a.suite, a.formula, a.cut(model, calibration)) for a in chosen]  # variants share weights
    with progress("ablations", len(variants)) as advance:
        for name, suite, formula, variant in variants:
            found = None if text is None else perplexity(variant, tokenizer, text)
            cost = solution_perplexity(variant, tokenizer) if found is None else found.perplexity
            right = _right(variant, tokenizer, prompts, [*asked, *asked[:recalls]])
            scores = _score(right[:questions]), _score(right[questions:])
            rows.append(AblationRow(name, suite, formula, cost, *scores))
            report(rows[-1])
            advance(1)
    lengths = [len(prompt) for prompt in prompts[questions:]]
    context = round(float(np.mean(lengths))) if lengths else 0
    return AblationReport(tuple(rows), "solutions" if text is None else "text", context)


def solution_perplexity(model: CausalLM, tokenizer: Tokenizer) -> float:
    """exp of the mean -ln p of the solutions' tokens, over the first `SCORED` held-out problems."""
    rows = solution_rows(tokenizer, exam(SCORED))
    scores = np.asarray(_likelihoods(model, rows.tokens), np.float64)
    return float(np.exp(-np.mean(scores[np.asarray(rows.learned)[:, 1:]])))


@eqx.filter_jit
def _likelihoods(model: CausalLM, tokens: Int32[Array, "batch seq"]) -> Float32[Array, "batch predicted"]:
    return log_likelihood(model(tokens)[:, :-1], tokens[:, 1:])


def solution_rows(tokenizer: Tokenizer, some: Iterable[Problem]) -> ProblemRows:
    """Tokenizes each problem, as it is asked, with its solution."""
    pairs = [(tokenizer.encode(ask(p)), tokenizer.encode(f" {p.solution}", add_special_tokens=False)) for p in some]
    width = max(len(prompt) + len(solution) for prompt, solution in pairs)
    tokens = np.zeros((len(pairs), width), np.int32)
    valid, learned = np.zeros_like(tokens, bool), np.zeros_like(tokens, bool)
    for row, (prompt, solution) in enumerate(pairs):
        end = len(prompt) + len(solution)
        tokens[row, :end] = prompt + solution
        valid[row, :end] = True
        learned[row, len(prompt) : end] = True
    return ProblemRows(jnp.asarray(tokens), jnp.asarray(valid), jnp.asarray(learned))


def _right(
    model: CausalLM, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], asked: Sequence[Problem]
) -> list[bool]:
    """For each prompt, True if the greedy answer ends with the right number."""
    settings = {"max_running_requests": 16, "chunked_prefill_size": 128, "token_paddings": (128,)}
    engine = Engine(model, tokenizer, max_model_len=max(map(len, prompts)) + ANSWER, **settings)
    # An ablated model may continue with another question instead of stopping; its answer comes before that.
    outputs = engine.generate(prompts, SamplingParams(max_tokens=ANSWER, stop=STOP))
    return [last_number(output.text) == problem.answer for output, problem in zip(outputs, asked, strict=True)]


def _score(right: Sequence[bool]) -> Score | None:
    return Score(sum(right), len(right)) if right else None
