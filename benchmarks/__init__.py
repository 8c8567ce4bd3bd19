"""How fast ling3 is: registered cases, each held to its oracle before its time is taken, beside its peer.

`python -m benchmarks` runs them. `decode_latency` and `soak` are commands of their own.
"""

import os

# torch's kernels need room on the same GPU: without this, jax takes three quarters of it at its first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
