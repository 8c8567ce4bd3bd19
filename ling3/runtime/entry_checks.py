"""Checks at the package's entry points, outside of compiled programs: of the process, and of token ids."""

import functools
import inspect
import os
import types
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge  # JAX has no public way to ask whether it is in use

# `uses_jax`: JAX was in use at this process's last fork. `forked`: this is the child of such a fork.
_process = types.SimpleNamespace(uses_jax=False, forked=False)


def _before_fork() -> None:
    _process.uses_jax = _process.forked or xla_bridge.backends_are_initialized()


def _after_fork() -> None:
    _process.forked = _process.uses_jax


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


# Not type-checked, like the check of ids: both run before every step, and a type check would take longer than they.
@no_type_check
def refuse_fork() -> None:
    """Raises RuntimeError in a fork of a process that had used JAX: without JAX's threads it would wait forever."""
    if _process.forked:
        raise RuntimeError(
            "this process was forked from one that had used JAX, whose threads do not survive a fork: start it with "
            "multiprocessing.get_context('spawn'), or fork before JAX is first used"
        )


def checks_ids(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function(model, tokens, ...)` to raise ValueError for ids outside the vocabulary: JAX reads other rows.

    Traced ids and the padding after a row's `lengths` are not checked. If the ids are still being computed on the
    device, `function` is dispatched first, so that the device has work while the check waits for them.
    """
    signature = inspect.signature(function)

    @no_type_check
    @functools.wraps(function)
    def call(model, tokens, *args, **kwargs):
        refuse_fork()
        if isinstance(tokens, jax.core.Tracer) or not isinstance(tokens, np.ndarray | jax.Array):
            return function(model, tokens, *args, **kwargs)
        ready = isinstance(tokens, np.ndarray) or tokens.is_ready()
        result = None if ready else function(model, tokens, *args, **kwargs)
        if _any_outside(model, tokens):
            _refuse(model, tokens, signature.bind(model, tokens, *args, **kwargs).arguments.get("lengths"))
        return function(model, tokens, *args, **kwargs) if ready else result

    return call


@no_type_check
def _any_outside(model, tokens) -> bool:
    """True if any of the ids, padding included, is outside the vocabulary; False for arrays of a wrong type or rank."""
    config = getattr(model, "config", None)
    if config is None or tokens.ndim != 2 or not tokens.size or not jnp.issubdtype(tokens.dtype, jnp.integer):
        return False
    if isinstance(tokens, jax.Array) and not tokens.is_fully_addressable:  # other processes have the other shards
        return False
    ids = np.asarray(tokens)
    return bool(ids.min() < 0 or ids.max() >= config.vocab_size)


@no_type_check
def _refuse(model, tokens, lengths) -> None:
    """Raises ValueError for the first id outside the vocabulary that is not padding, if there is one."""
    ids, vocab = np.asarray(tokens), model.config.vocab_size
    outside = (ids < 0) | (ids >= vocab)
    if isinstance(lengths, jax.core.Tracer) or (lengths is not None and np.shape(lengths) != ids.shape[:1]):
        return
    if lengths is not None:
        outside &= np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    if outside.any():
        place = np.argwhere(outside)[0].tolist()
        raise ValueError(f"tokens{place} is {ids[tuple(place)]}, expected an id in [0, {vocab})")
