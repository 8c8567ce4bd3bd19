"""The benchmark cases, by group; importing this package registers them all, in the order of the table."""

from benchmarks.cases import (
    engine,
    families,
    fleet,
    formats,
    gpu,
    growth,
    loading,
    model,
    operators,
    peers,
    prefixes,
    server,
    speculation,
    start,
    training,
    whole,
)

__all__ = [
    "engine",
    "families",
    "fleet",
    "formats",
    "gpu",
    "growth",
    "loading",
    "model",
    "operators",
    "peers",
    "prefixes",
    "server",
    "speculation",
    "start",
    "training",
    "whole",
]
