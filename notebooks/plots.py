"""How the notebooks' pictures look: colours that the colour-blind can tell apart, and that print well in grey."""

import matplotlib.pyplot as plt
from cycler import cycler

# Okabe & Ito's palette ("Color Universal Design", 2008).
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
KDA, MLA = BLUE, RED  # a layer kind has one colour in all notebooks
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo")


def use() -> None:
    """Sets matplotlib's defaults: line styles and markers change with the colour, and figures keep their margins."""
    styles = cycler(color=[BLUE, RED, GREEN, ORANGE, PINK, SKY, BLACK])
    styles += cycler(linestyle=["-", "--", "-.", ":", "-", "--", "-."]) + cycler(
        marker=["o", "s", "^", "D", "v", "P", "X"]
    )
    plt.rcParams.update(
        {
            "axes.prop_cycle": styles,
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "figure.dpi": 110,
            "figure.figsize": (7, 3.6),
            "font.size": 10,
            "grid.alpha": 0.3,
            "image.cmap": "cividis",
            "lines.markersize": 4,
        }
    )
