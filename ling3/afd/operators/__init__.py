"""CANN's operators for attention-FFN disaggregation, as pure functions over the windows of sessions and cards.

A micro-batch passes through `sending`, `batching` and `returning`, in this order. Operators take an area and return a
new one, with the same bits eagerly and under `jax.jit`. All raise ValueError, which names the argument or field, for
anything outside of `limits`.
"""
