"""The strict session every test runs in."""

import gc
import importlib.metadata
import os
import pathlib

# Where programs are compiled without most optimizations, the older emitters compile faster still; jax 0.11 has none.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # One thread compiles a program: there is a worker for each core, and a program in parts takes a quarter more.
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false"
        if "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ and importlib.metadata.version("jaxlib") < "0.11"
        else "",
    ]
)
os.environ["HF_HUB_OFFLINE"] = "1"
# The processes that tests start write nothing into the user's cache.
os.environ["LING3_COMPILATION_CACHE"] = "off"
os.environ["LING3_NATIVE"] = "off"

import hypothesis
import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Workers of one run, and later runs, share what was compiled.
PROGRAMS = pathlib.Path(os.environ.get("LING3_TEST_PROGRAMS", pathlib.Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# The same examples every time: in float32 a rare draw falls on a tie between experts, which rounding alone decides.
hypothesis.settings.register_profile("ling3", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ling3")

# Tracing makes many objects, and each collection walks over jax's own: by default that is a twelfth of the time.
gc.set_threshold(100_000, 10, 10)

MAPPINGS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Drops what was compiled before it is too much: programs are memory mappings, of which Linux grants 65,530.

    XLA crashes at the next one. What is dropped comes back from the cache on disk.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > 35_000:
        jax.clear_caches()
        gc.collect()
