"""Recall that has to forget: after `new`, the keys of earlier segments have no value any more.

    Resets: new fox gold elm tin … ? elm tin owl none … new owl silk …

Half of the questions ask for keys of their segment, the others for keys of earlier segments. At a single token, `new`,
the memory has to be emptied: decay does that, and a bound on the decay limits it.
"""

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Bindings, Segment, Skill, Text
from ling3.train.nano.skills.words import KEYS, VALUES

SEGMENTS, PAIRS, ASKED = 5, 5, 6
NAMES = KEYS[:24]
BOUND = Bindings("resets", NAMES, VALUES)
NOTHING = " none"


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """Five segments of five pairs and six questions; every pair with the key asked last is from this split."""
    segments = [rng.permutation(len(NAMES))[:PAIRS] for _ in range(SEGMENTS)]
    questions, earlier = [], np.zeros(0, int)
    for keys in segments:
        stale = np.setdiff1d(earlier if earlier.size else np.arange(len(NAMES)), keys)
        own = rng.permutation(keys)[: ASKED // 2]
        questions.append(rng.permutation(np.concatenate([own, rng.permutation(stale)[: ASKED - len(own)]])))
        earlier = np.union1d(earlier, keys)
    asked, pieces, text = questions[-1][-1], [], "Resets:"
    for keys, questioned in zip(segments, questions, strict=True):
        values = dict(zip(keys, BOUND.draw(rng, keys, "train"), strict=True))
        if asked in values:
            values[asked] = BOUND.draw(rng, np.array([asked]), split)[0]
        text += " new" + "".join(f" {NAMES[key]} {value}" for key, value in values.items()) + " ?"
        for key in questioned:
            answer = f" {values[key]}" if key in values else NOTHING
            pieces += [(f"{text} {NAMES[key]}", False), (answer, True)]
            text = ""
    return Text(tuple[Segment, ...](pieces))


RESETS = Skill("resets", _draw, longest=122, pulls=("decay", "decay bound", "short convolution"))
