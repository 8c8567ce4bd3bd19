"""Nano's exams: held-out word problems, asked alone, after four worked examples, and in a chat."""

from collections.abc import Sequence

import numpy as np

from ling3.generate import generate
from ling3.model import CausalLM
from ling3.text.tokenizer import Tokenizer
from ling3.train.nano.problems import ask, chat_prompt, exam, last_integer, worked_examples


def exact_answers(
    model: CausalLM, tokenizer: Tokenizer, prompts: Sequence[str], answers: Sequence[int], batch: int = 50
) -> list[bool]:
    """For each prompt, True if its greedy continuation ends with the right number."""
    given = []
    for first in range(0, len(prompts), batch):
        ids = [tokenizer.encode(prompt) for prompt in prompts[first : first + batch]]
        replies = generate(model, ids, max_tokens=64, temperature=0.0)
        given += [last_integer(tokenizer.decode(reply)) for reply in replies]
    return [number == answer for number, answer in zip(given, answers, strict=True)]


def examine(model: CausalLM, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The share of exact answers to `count` held-out problems: alone, after four worked examples, and in a chat."""
    asked = exam(count)
    answers = [problem.answer for problem in asked]
    prompts = {
        "alone": [ask(problem) for problem in asked],
        "after_four_examples": [ask(p, shown) for p, shown in zip(asked, worked_examples(count), strict=True)],
        "chat": [chat_prompt(problem) for problem in asked],
    }
    return {name: float(np.mean(exact_answers(model, tokenizer, text, answers))) for name, text in prompts.items()}
