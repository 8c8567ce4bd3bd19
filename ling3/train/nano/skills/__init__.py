"""The skills of *nano*, a file for each.

A skill is a file of one shape: a generator of texts (`draw`) whose training texts and held-out texts are disjoint by
construction, which of their tokens are learned, how long they are, and which mechanisms of the architecture it is
expected to need. `skill` has that shape, `SKILLS` has all of them.
"""

from ling3.train.nano.skills.copying import COPYING
from ling3.train.nano.skills.facts import FACTS
from ling3.train.nano.skills.positions import POSITIONS
from ling3.train.nano.skills.recall import LONG_RECALL, RECALL
from ling3.train.nano.skills.resets import RESETS
from ling3.train.nano.skills.skill import Skill, Text, encode
from ling3.train.nano.skills.tracking import TRACKING
from ling3.train.nano.skills.word_problems import CHAT, EXAMPLES, PROBLEMS

SKILLS = {
    skill.name: skill
    for skill in (PROBLEMS, CHAT, EXAMPLES, RECALL, LONG_RECALL, RESETS, COPYING, FACTS, TRACKING, POSITIONS)
}
"""By name."""

__all__ = ["SKILLS", "Skill", "Text", "encode"]
