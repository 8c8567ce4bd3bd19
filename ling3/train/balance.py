"""Load balancing without an auxiliary loss (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, §2.1.2).

An expert's bias takes part only in the choice of experts, so no gradient reaches it. After each step

    bias += u · sign(mean load - load)

where `load` is the expert's share of all choices. This is sign descent on `load - mean load`: during training the
router reports that difference as the gradient of its bias, and the optimizer updates biases separately from weights.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, PyTree

from ling3.execution import PLAIN, Execution
from ling3.layers.moe import MoE, Router
from ling3.model import CausalLM


class BalancedRouter(eqx.Module):
    """A router with the same outputs, whose `expert_bias` has the gradient `load - mean load`."""

    router: Router

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        ids: Int[Array, " tokens"] | None = None,
        execution: Execution = PLAIN,
    ) -> tuple[Int32[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
        """The experts chosen for each token, best first, and their weights."""
        chosen, weights = self.router(x, ids, execution)
        bias = self.router.expert_bias
        assert bias is not None, "`balanced` leaves a router without a bias as it is"
        return chosen, _report(weights, excess_load(chosen, bias.size).astype(bias.dtype), bias)


def excess_load(chosen: Int32[Array, "tokens top_k"], experts: int) -> Float[Array, " experts"]:
    """Each expert's share of the choices minus the mean share `1 / experts`; these sum to 0."""
    counts = jnp.zeros(experts, jnp.float32).at[chosen].add(1.0)
    return counts / chosen.size - 1.0 / experts


@jax.custom_vjp
def _report(
    weights: Float[Array, "tokens top_k"], excess: Float[Array, " experts"], bias: Float[Array, " experts"]
) -> Float[Array, "tokens top_k"]:
    return weights


def _report_forward(
    weights: Float[Array, "tokens top_k"], excess: Float[Array, " experts"], bias: Float[Array, " experts"]
) -> tuple[Float[Array, "tokens top_k"], Float[Array, " experts"]]:
    return weights, excess


def _report_backward(
    excess: Float[Array, " experts"], gradient: Float[Array, "tokens top_k"]
) -> tuple[Float[Array, "tokens top_k"], Float[Array, " experts"], Float[Array, " experts"]]:
    return gradient, jnp.zeros_like(excess), excess


_report.defvjp(_report_forward, _report_backward)


def _routers(model: PyTree) -> list:
    """The routers that have a bias, wrapped or not."""
    further = model.mtp if isinstance(model.mtp, tuple) else ()  # `tree_at` shows an empty tuple as a leaf
    gates = [layer.mlp.gate for layer in (*model.model.layers, *further) if isinstance(layer.mlp, MoE)]
    return [gate for gate in gates if not isinstance(gate, Router) or gate.expert_bias is not None]


def balanced(model: CausalLM) -> CausalLM:
    """The model with each router that has a bias wrapped in a `BalancedRouter`; the logits are the same."""
    return eqx.tree_at(_routers, model, replace_fn=BalancedRouter) if _routers(model) else model


def plain(model: CausalLM) -> CausalLM:
    """Undoes `balanced`: the model with its routers unwrapped."""
    routers = [gate.router for gate in _routers(model) if isinstance(gate, BalancedRouter)]
    return eqx.tree_at(_routers, model, routers) if routers else model


def expert_biases(model: PyTree) -> list:
    """The expert biases of a balanced model, or of a tree with its structure, layer by layer."""
    return [gate.router.expert_bias for gate in _routers(model)]
