"""Scores in nano's skills (`ling3.train.nano.skills`)."""

from collections.abc import Sequence

from ling3.evals.run import Score
from ling3.model import CausalLM
from ling3.text.tokenizer import Tokenizer
from ling3.train.nano.skills import SKILLS
from ling3.train.nano.skills.exam import right_answers


def check_skills(names: Sequence[str]) -> None:
    """Raises ValueError, listing the skills, for a name that is not one of them."""
    if wrong := [name for name in names if name not in SKILLS]:
        raise ValueError(f"found no skill {', '.join(map(repr, wrong))}; the skills are {', '.join(SKILLS)}")


def skill_scores(model: CausalLM, tokenizer: Tokenizer, names: Sequence[str], questions: int) -> dict[str, Score]:
    """The model's score in each skill, on the first `questions` texts of its exam."""
    check_skills(names)
    found = {name: right_answers(model, tokenizer, SKILLS[name].exam(questions)) for name in names}
    return {name: Score(sum(right), len(right)) for name, right in found.items()}
