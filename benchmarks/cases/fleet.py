"""Many engines: the same cores, shared among replicas or all for one engine."""

import jax.numpy as jnp

import ling3
from benchmarks.cases.engine import seconds, together
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from ling3.bench.measure import random_requests


@case("fleet/threads", "64 mixed requests on nano: two replicas of one thread against one of two threads.", rounds=5)
def threads(setting: Setting) -> Trial:
    """Seconds for all of them; each side is a fleet, so that both send prompts and answers through Ray."""
    try:
        import ray  # noqa: PLC0415 -- from an extra
    except ModuleNotFoundError:
        raise Absent("Ray (pip install 'ling3[fleet]')") from None
    if not ray.is_initialized():
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    longest = setting.size(full=256, toy=16)
    model = ling3.load("nano", dtype=jnp.float32)
    requests = random_requests(setting.size(full=64, toy=8), model.config.vocab_size, (16, longest), (16, longest))
    shape = {"max_running_requests": 16, "max_model_len": 512, "prefix_cache": False}
    engine = ling3.Engine(model, **shape)
    expected = together(engine, requests)
    sides = []
    for name, replicas, cpus in (("2 replicas, 1 thread each", 2, 1), ("1 replica, 2 threads", 1, 2)):
        fleet = ling3.Fleet("nano", replicas, jnp.float32, cpus=cpus, **shape)

        def check(fleet: ling3.Fleet = fleet) -> str:
            if together(fleet, requests) != expected:
                raise Wrong("the fleet's tokens are not the engine's")
            return "the tokens of an engine in this process"

        sides.append(Side(name, seconds(lambda fleet=fleet: together(fleet, requests)), check))
    about = {"requests": len(requests), "settings": shape}
    return Trial(sides, unit="s", tokens=sum(request.max_tokens for request in requests), about=about)
