"""The skills of *nano*, one file each.

A file defines a generator of texts (`draw`) whose training and held-out texts are disjoint by construction, which
tokens are learned, how long the texts are, and which mechanisms of the architecture the skill is expected to need.
`skill` defines this structure, and `SKILLS` lists all skills.
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
"""All skills by name."""

__all__ = ["SKILLS", "Skill", "Text", "encode"]
