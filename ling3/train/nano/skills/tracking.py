"""State tracking: who has what now, after events that change it and events that do not.

    Track: Anna takes gold Ben sees tin Anna sees silk Anna has gold Anna takes lead …

`takes` replaces what a person has, `sees` changes nothing. Beta decides whether and how strongly an event is written.
"""

import numpy as np

from ling3.train.nano.problems import PEOPLE, Split
from ling3.train.nano.skills.skill import Bindings, Segment, Skill, Text
from ling3.train.nano.skills.words import VALUES

NAMES = tuple(name for name, _ in PEOPLE[:8])
HELD = Bindings("tracking", NAMES, VALUES)
EVENTS = 36


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """36 events of eight people; all that the person asked last takes is from this split."""
    asked = int(rng.integers(len(NAMES)))
    people, kinds = rng.integers(len(NAMES), size=EVENTS), rng.random(EVENTS)
    people[-1] = asked
    if asked not in people[:-1]:
        people[rng.integers(EVENTS // 2)] = asked
    seen = HELD.draw(rng, people, "train")
    taken = HELD.draw(rng, people, "train")
    own = HELD.draw(rng, people, split)
    has: dict[int, str] = {}
    pieces: list[Segment] = []
    text = "Track:"
    for i, person in enumerate(people.tolist()):
        name = NAMES[person]
        if person not in has or (i < EVENTS - 1 and kinds[i] < 0.3):
            has[person] = own[i] if person == asked else taken[i]
            text += f" {name} takes {has[person]}"
        elif i < EVENTS - 1 and kinds[i] < 0.55:
            text += f" {name} sees {seen[i]}"
        else:
            pieces += [(f"{text} {name} has", False), (f" {has[person]}", True)]
            text = ""
    return Text(tuple(pieces))


TRACKING = Skill("tracking", _draw, longest=2 + 3 * EVENTS, pulls=("writing strength", "decay"))
