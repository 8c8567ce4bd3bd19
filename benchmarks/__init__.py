"""Benchmarks of ling3: registered cases, each checked against an oracle before it is timed beside its peers.

`python -m benchmarks` runs them. `decode_latency`, `soak` and `server_soak` are separate commands.
"""

import os

# torch's kernels need room on the same GPU: without this, jax preallocates three quarters of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
