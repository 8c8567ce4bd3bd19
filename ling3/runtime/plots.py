"""The style of plots: colours that colour-blind readers can tell apart, and that print well in grey."""

# Okabe & Ito's palette ("Color Universal Design", 2008).
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PINK = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
KDA, MLA = BLUE, RED
"""Each kind of layer has the same colour in all plots."""
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo")


def use() -> None:
    """Sets matplotlib's defaults: line style and marker vary with the colour, and layouts are constrained."""
    # Imported here, as the colours alone do not need matplotlib.
    import matplotlib.pyplot as plt  # noqa: PLC0415
    from cycler import cycler  # noqa: PLC0415

    styles = cycler(color=[BLUE, RED, GREEN, ORANGE, PINK, SKY, BLACK])
    styles += cycler(linestyle=["-", "--", "-.", ":", "-", "--", "-."])
    styles += cycler(marker=["o", "s", "^", "D", "v", "P", "X"])
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
