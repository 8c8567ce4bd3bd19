"""transformers' Ling-3 as a throughput benchmark needs it: left-padded batches, and the fastest of its own forms.

Needs the extra `parity`, and borrows from `tests/` what draws random checkpoints and loads them into transformers.
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
import transformers

import ling3
from ling3.bench import SampleRequest

sys.path[:0] = [str(Path(__file__).parent.parent / name) for name in ("tests", "tests/parity")]
from oracle import Oracle  # noqa: E402
from random_checkpoint import draw, write  # noqa: E402

BATCH = 16
"""Rows of a batch."""
TRIED, TURNS = 8, 3
"""New tokens and turns by which implementations are compared."""


class Peer:
    """A random checkpoint of `config` in transformers, float32, on all cores; its `ling3` has the same weights."""

    def __init__(self, config: ling3.Ling3Config):
        torch.set_num_threads(os.cpu_count() or 1)
        weights = draw(config, seed=0)
        self.config, self.model = config, Oracle(config, weights).model
        self.parameters = sum(w.size for w in weights.values())
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory), config, weights)
            self.ling3 = ling3.load(directory, dtype=jnp.float32)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}

    def generate(self, requests: Sequence[SampleRequest], most: int = sys.maxsize) -> list[list[int]]:
        """Each request's greedy tokens, at most `most` a row. A batch runs to its longest row."""
        answers = []
        for start in range(0, len(requests), BATCH):
            batch = requests[start : start + BATCH]
            longest = max(len(request.prompt) for request in batch)
            new = min(max(request.max_tokens for request in batch), most)
            pads, pad = [longest - len(request.prompt) for request in batch], self.config.pad_token_id
            ids = torch.tensor([[pad] * n + list(request.prompt) for n, request in zip(pads, batch)])
            mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])
            with torch.inference_mode():
                out = self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=new,
                    min_new_tokens=new,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=pad,
                    eos_token_id=None,
                )
            rows = out[:, longest:].tolist()
            answers += [row[: request.max_tokens] for row, request in zip(rows, batch)]
        return answers

    def be_fastest(self, requests: Sequence[SampleRequest]) -> dict[str, float]:
        """Takes the fastest of its implementations here; the seconds of each, for a prefill and 8 tokens."""
        choices = (("eager", "sdpa"), ("eager", "eager"), ("grouped_mm", "sdpa"))
        times: list[list[float]] = [[] for _ in choices]
        for turn in range(TURNS + 1):  # the first is for warming up
            for choice, seconds in zip(choices, times, strict=True):
                self._implement(*choice)
                begin = time.perf_counter()
                self.generate(requests, TRIED)
                if turn > 0:
                    seconds.append(time.perf_counter() - begin)
        self._implement(*choices[int(np.argmin([min(seconds) for seconds in times]))])
        return {
            f"experts {experts}, attention {attention}": round(min(seconds), 3)
            for (experts, attention), seconds in zip(choices, times, strict=True)
        }

    def _implement(self, experts: str, attention: str) -> None:
        self.model.set_experts_implementation(experts)
        self.model.set_attn_implementation(attention)
