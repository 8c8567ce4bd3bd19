"""Ling-3 as a model of lm-evaluation-harness (the extra `evals`), registered as `ling3`.

    python -m ling3.evals.harness run --model ling3 --model_args pretrained=nano --tasks gsm8k --limit 20

runs the harness's command line with this model registered; from Python, `simple_evaluate(model=Ling3LM("nano"), …)`.
"""

# pyright: reportMissingImports=false
# The harness is an extra, and types are checked without it too.

import logging
import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ling3 import checkpoint
from ling3.checkpoint import hub
from ling3.engine.sampling_params import SamplingParams
from ling3.evals.perplexity import log_likelihood, log_likelihoods, start_token
from ling3.model import CausalLM
from ling3.runtime.progress import progress
from ling3.serve import Engine
from ling3.text.tokenizer import load_tokenizer

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise ImportError("lm-evaluation-harness is missing: pip install 'ling3[evals]'") from error

logger = logging.getLogger(__name__)

DTYPES = {"auto": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
THINKING = {"auto": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}

# Continuations are scored in batches of ROWS sequences, or of fewer if the logits would exceed LOGITS numbers (1 GiB of
# float32), padded to a power of two of at least SMALLEST_WIDTH tokens.
ROWS, SMALLEST_WIDTH, LOGITS = 16, 16, 2**28


@register_model("ling3")
class Ling3LM(TemplateLM):
    """A checkpoint for the harness: log-likelihoods from `model(tokens)`, generated texts from the engine.

    Ids, scores and texts equal those of the harness's `hf` model on the same checkpoint (tests/parity/test_harness.py).
    `pretrained` and `revision` are as for `ling3.load`. `max_length` is the most tokens of prompt and answer (by
    default the model's context), `thinking` the chat template's mode under `--apply_chat_template`. `batch_size`,
    `max_batch_size` and `device` are ignored: the engine batches by itself, on JAX's device.
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        max_running_requests: int = 64,
        thinking: str = "auto",
        revision: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ):
        super().__init__()
        for name, value, known in (("dtype", dtype, DTYPES), ("thinking", thinking, THINKING)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")
        commit = hub.pin(pretrained, revision)
        self.tokenizer = load_tokenizer(pretrained, revision=commit)
        self.model = checkpoint.load(pretrained, DTYPES[dtype], revision=commit)
        self.tokenizer.check_fits(self.model.config.vocab_size)
        limit = self.model.config.max_position_embeddings
        self.max_length = limit if max_length is None else max_length
        if not 2 <= self.max_length <= limit:
            raise ValueError(
                f"max_length is {max_length}, expected a whole number in [2, {limit}], the model's context"
            )
        self.max_gen_toks = max_gen_toks
        self._slots, self._thinking = max_running_requests, THINKING[thinking]
        self._engine: Engine | None = None

    # Text and ids

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token = self.tokenizer.token_named("eos_token")
        return self.prefix_token_id if token is None else token

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        return start_token(self.tokenizer)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """The ids of a text, by default with special tokens unless it already begins with the prefix token."""
        if add_special_tokens is None:
            before = self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(before)
        return self.tokenizer.encode(string, add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        """The checkpoint's directory or file, by which the harness keeps its caches apart."""
        return self.tokenizer.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, rendered by the checkpoint's chat template."""
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt, tokenize=False, **self._thinking
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, for the harness's record."""
        if not chat_template or self.tokenizer.chat_template is None:
            return None
        return self.tokenizer.chat_template.source

    # Log-likelihoods

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        """ln p(continuation | context) of each (texts, context, continuation), and True if it is the greedy one.

        A context that is too long for `max_length` is truncated on the left. Raises ValueError if the continuation
        alone is too long.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        by_width: dict[int, list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"request {i}: a continuation of {len(continuation)} tokens, where max_length is {self.max_length}"
                )
            length = min(len(context) + len(continuation) - 1, self.max_length)
            width = max(SMALLEST_WIDTH, 1 << (length - 1).bit_length())
            if continuation:
                by_width.setdefault(min(width, self.max_length), []).append(i)
        with progress("scoring", len(requests)) as advance:
            for width, members in sorted(by_width.items(), reverse=True):
                rows = max(1, min(ROWS, LOGITS // (width * self.model.config.vocab_size)))
                for first in range(0, len(members), rows):
                    batch = members[first : first + rows]
                    for i, score in zip(batch, self._scores([requests[i][1:] for i in batch], rows, width)):
                        found[i] = score
                    advance(len(batch))
        for request, score in zip(requests, found, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], score)
        return found

    def _scores(self, pairs: list[tuple[list[int], list[int]]], rows: int, width: int) -> list[tuple[float, bool]]:
        tokens, targets = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.int32)
        spans = []
        for row, (context, continuation) in enumerate(pairs):
            ids = [*context, *continuation][-(self.max_length + 1) :]
            tokens[row, : len(ids) - 1], targets[row, : len(ids) - 1] = ids[:-1], ids[1:]
            spans.append(slice(len(ids) - 1 - len(continuation), len(ids) - 1))
        scores, best = (np.asarray(array) for array in _scored(self.model, jnp.asarray(tokens), jnp.asarray(targets)))
        found = [(math.fsum(scores[row, span]), bool(best[row, span].all())) for row, span in enumerate(spans)]
        if not all(math.isfinite(score) for score, _ in found):
            raise FloatingPointError(
                "a log-likelihood is not finite: the weights may not be, or their dtype too narrow"
            )
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """ln p of each text, over windows of `max_length` tokens; the last one is full too, so it may overlap."""
        found = []
        with progress("scoring", len(requests)) as advance:
            for request in requests:
                (text,) = request.args
                ids = self.tok_encode(text)
                tokens = [self.prefix_token_id, *ids]
                score = math.fsum(log_likelihoods(self.model, tokens, self.max_length, self.max_length)) if ids else 0.0
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
                found.append(score)
                advance(1)
        return found

    # Texts

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The model's text after each context, up to the first of its `until` strings or `max_gen_toks` tokens.

        Only the new tokens are decoded, so a tokenizer may strip their first blank. Contexts that are too long are
        truncated on the left, with a warning. Raises ValueError for an option that the engine does not have and for a
        `max_gen_toks` that leaves no room for a prompt, and FloatingPointError if a request fails.
        """
        if self._engine is None:
            self._engine = Engine(
                self.model,
                self.tokenizer,
                max_running_requests=self._slots,
                max_model_len=self.max_length,
            )
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        params = [self._params(request.args[1]) for request in requests]
        room = [self.max_length - each.max_tokens for each in params]
        cut = sum(len(prompt) > most for prompt, most in zip(prompts, room, strict=True))
        if cut:
            logger.warning("%d of %d prompts are too long for max_length and lose their beginnings", cut, len(prompts))
        texts = []
        outputs = self._engine.generate(prompts, params, truncate="prompt")
        for request, param, output in zip(requests, params, outputs, strict=True):
            if output.error is not None:
                raise FloatingPointError(f"{request.task_name}, document {request.doc_id}: {output.error}")
            # Decoded by the library, as in `hf`: a run of byte tokens with an invalid one shows no character at all.
            whole = self.tokenizer.backend.decode(list(output.token_ids))
            text = postprocess_generated_text(whole, list(param.stop), None)
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        """The harness's options as SamplingParams; greedy by default."""
        named: dict[str, Any] = {**normalize_gen_kwargs(options, self.max_gen_toks)}
        until, most, _ = named.pop("until"), named.pop("max_gen_toks"), named.pop("do_sample", None)
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        try:
            return SamplingParams(
                stop=tuple(stop for stop in handle_stop_sequences([*until], end) if stop),
                max_tokens=most,
                **{"temperature": 0.0, "seed": 0, **named},
            )
        except TypeError as error:
            raise ValueError(f"generation_kwargs: {error}; the names are those of SamplingParams") from error


@eqx.filter_jit
def _scored(
    model: CausalLM, tokens: Int32[Array, "batch seq"], targets: Int32[Array, "batch seq"]
) -> tuple[Float32[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """ln p of the targets, and True where a target is the likeliest token."""
    logits = model(tokens)
    return log_likelihood(logits, targets), jnp.argmax(logits, axis=2) == targets


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
