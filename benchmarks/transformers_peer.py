"""transformers' model for benchmarks: its public `generate`, with the implementation that is fastest in each case."""

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.registry import Absent
from ling3.bench.measure import SampleRequest

EXPERTS = ("grouped_mm", "batched_mm", "eager")
GATHERED = 64
"""The most prompt tokens with which batched_mm is tried: it copies expert weights for every token."""


class Peer:
    """The checkpoint in `directory` as a transformers model, on all cores."""

    def __init__(self, directory: Path, dtype: str = "float32"):
        if importlib.util.find_spec("transformers") is None:
            raise Absent("transformers is not installed: pip install -e '.[parity]'")
        import torch  # noqa: PLC0415 -- an extra
        import transformers  # noqa: PLC0415

        torch.set_num_threads(os.cpu_count() or 1)
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # no hints about faster kernels for GPUs
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self.torch, self.model = torch, model.eval().requires_grad_(False)
        pad = self.model.config.pad_token_id
        self.pad = 0 if pad is None else pad

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """`new` greedy tokens of each prompt, in one left-padded batch."""
        torch, longest = self.torch, max(map(len, prompts))
        pads = [longest - len(prompt) for prompt in prompts]
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([[self.pad] * n + list(prompt) for n, prompt in zip(pads, prompts)]),
                attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in pads]),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                use_cache=True,
                pad_token_id=self.pad,
                eos_token_id=None,
            )
        return out[:, longest:].tolist()

    def answer(self, requests: Sequence[SampleRequest], batch: int) -> list[list[int]]:
        """The tokens of all requests, `batch` at a time in order; a batch runs as long as its longest row."""
        answers = []
        for start in range(0, len(requests), batch):
            some = requests[start : start + batch]
            new = max(request.max_tokens for request in some)
            rows = self.generate([request.prompt for request in some], new)
            answers += [row[: request.max_tokens] for row, request in zip(rows, some)]
        return answers

    def logits(self, prompts: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> np.ndarray:
        """The logits that each of the `new` tokens was chosen from, [batch, new, vocab], in one pass without a cache.

        All prompts must have one length, and all rows of `new` too.
        """
        tokens = [[*prompt, *row[:-1]] for prompt, row in zip(prompts, new, strict=True)]
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor(tokens), use_cache=False, logits_to_keep=len(new[0]))
        return out.logits.float().numpy()

    def be_fastest(self, prompts: Sequence[Sequence[int]], new: int) -> dict[str, float]:
        """Selects the fastest implementation on these prompts; returns the seconds of each, the better of two tries."""
        seconds: dict[str, float] = {}
        choices = {}
        for experts, attention in self._choices(sum(map(len, prompts))):
            self._implement(experts, attention)
            name = f"attention {attention}" if experts is None else f"experts {experts}, attention {attention}"
            choices[name] = experts, attention
            for _ in range(2):
                begin = time.perf_counter()
                self.generate(prompts, new)
                seconds[name] = min(seconds.get(name, np.inf), time.perf_counter() - begin)
        self._implement(*choices[min(seconds, key=seconds.__getitem__)])
        return {name: round(value, 3) for name, value in seconds.items()}

    def _choices(self, rows: int) -> Iterator[tuple[str | None, str]]:
        """Implementations of experts and attention to try. Attention takes little time, so eager is tried only once."""
        if not any("experts" in name for name, _ in self.model.named_parameters()):
            yield from ((None, "sdpa"), (None, "eager"))
            return
        for experts in EXPERTS:
            if experts != "batched_mm" or rows <= GATHERED:
                yield experts, "sdpa"
        yield "grouped_mm", "eager"

    def _implement(self, experts: str | None, attention: str) -> None:
        if experts is not None:
            self.model.set_experts_implementation(experts)
        self.model.set_attn_implementation(attention)
