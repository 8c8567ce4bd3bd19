"""CANN's operators for attention-FFN disaggregation, as pure functions over the windows of sessions and cards.

A micro-batch goes through them in the order of the files: `sending`, `batching`, `returning`. An area goes in and a new
one comes out, eagerly and under `jax.jit` with the same bits. An argument or field outside of `limits` is a ValueError.
"""
