"""Draws docs/layers.png, the layer patterns of the published models: `python docs/layers.py`."""

import pathlib

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from ling3 import Ling3Config

FLASH = {"num_hidden_layers": 42, "layer_group_size": 6, "first_k_dense_replace": 2}
MODELS = {"Ling-3.0-tiny": Ling3Config(), "Ling-3.0-flash": Ling3Config(**FLASH)}
# Okabe and Ito's colours, told apart by the colour-blind; hatching tells them apart in print.
LOOKS = {
    "kda": ("#56B4E9", "", "KDA: one matrix per head, the same size at any length"),
    "mla": ("#D55E00", "///", "MLA: attends to every token, 576 numbers each"),
    "dense": ("#F0E442", "...", "dense MLP"),
    "moe": ("#009E73", "", "mixture of experts"),
}


def block(axes: plt.Axes, x: float, y: float, kind: str) -> None:
    """One layer's part, as a box at (x, y)."""
    colour, hatch, _ = LOOKS[kind]
    style = {"boxstyle": "round,pad=0,rounding_size=0.12", "linewidth": 0.6, "edgecolor": "white"}
    axes.add_patch(FancyBboxPatch((x + 0.06, y), 0.88, 0.8, facecolor=colour, hatch=hatch, **style))


figure, axes = plt.subplots(figsize=(11, 3.4), dpi=160)
for row, (name, config) in enumerate(MODELS.items()):
    base = -2.9 * row
    for layer in range(config.num_hidden_layers):
        block(axes, layer, base + 0.9, config.attention_kind(layer))
        block(axes, layer, base, config.mlp_kind(layer))
        axes.text(layer + 0.5, base - 0.35, str(layer), ha="center", va="center", fontsize=6, color="0.35")
    axes.text(-0.4, base + 1.3, "attention", ha="right", va="center", fontsize=8)
    axes.text(-0.4, base + 0.4, "mlp", ha="right", va="center", fontsize=8)
    axes.text(0, base + 1.95, f"{name}, {config.num_hidden_layers} layers", fontsize=9, weight="bold")
handles = [
    plt.Rectangle((0, 0), 1, 1, facecolor=colour, hatch=hatch, edgecolor="white", label=label)
    for colour, hatch, label in LOOKS.values()
]
axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=4, frameon=False, fontsize=8)
axes.set(xlim=(-3.6, 42.2), ylim=(-3.6, 2.6))
axes.axis("off")
for suffix in (".png", ".svg"):
    figure.savefig(pathlib.Path(__file__).with_suffix(suffix), bbox_inches="tight", facecolor="white")
