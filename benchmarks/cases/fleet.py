"""A fleet of engines: the same cores divided among replicas, or all for one engine."""

import jax.numpy as jnp

import ling3
from benchmarks.cases.engine import seconds, together
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from ling3.bench.measure import random_requests
from ling3.fleet import cluster


@case("fleet/threads", "64 mixed requests on nano: two replicas of one thread against one engine of two.", rounds=11)
def threads(setting: Setting) -> Trial:
    """Seconds for all requests, against one replica with as many slots as each of the two, one with as many as both
    together, and an engine without Ray."""
    try:
        ray = cluster.library()
    except ValueError:
        raise Absent("Ray (pip install 'ling3[fleet]')") from None
    cluster.join_cluster(ray, None, 6)  # before JAX computes anything here
    longest = setting.size(full=256, toy=16)
    model = ling3.load("nano", dtype=jnp.float32)
    requests = random_requests(setting.size(full=64, toy=8), model.config.vocab_size, (16, longest), (16, longest))
    shape = {"max_running_requests": 16, "max_model_len": 512, "prefix_cache": False}
    wide = shape | {"max_running_requests": 32}
    engine = ling3.Engine(model, **shape)
    expected = together(engine, requests)

    def side(name: str, server: ling3.Engine | ling3.Fleet) -> Side:
        def check() -> str:
            if together(server, requests) != expected:
                raise Wrong("its tokens are not those of an engine in this process")
            return "the tokens of an engine in this process"

        return Side(name, seconds(lambda: together(server, requests)), check)

    sides = [
        side("2 replicas, 1 thread each", ling3.Fleet("nano", 2, jnp.float32, cpus=1, **shape)),
        side("1 replica, 2 threads", ling3.Fleet("nano", 1, jnp.float32, cpus=2, **shape)),
        side("1 replica, 2 threads, 32 at once", ling3.Fleet("nano", 1, jnp.float32, cpus=2, **wide)),
        side("an engine in this process", engine),
    ]
    about = {"requests": len(requests), "settings": shape}
    return Trial(sides, unit="s", tokens=sum(request.max_tokens for request in requests), about=about)
