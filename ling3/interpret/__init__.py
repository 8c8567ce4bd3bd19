"""Tools to look into a model: traces, ablations, and reports of its structure, kernels and sharding."""
