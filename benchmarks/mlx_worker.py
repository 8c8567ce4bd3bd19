"""mlx-lm behind a pipe: `PYTHON mlx_worker.py CHECKPOINT BITS`, with the Python of an environment that has it.

The checkpoint has float weights. BITS is 4 or 8, to which mlx quantizes it in groups of 32 with a scale and a bias
each, or 32 for float32. Each line of JSON on stdin, {"prompts": [[id, …], …], "new": [n, …]} with prompts of one
length, is answered by a line on stdout: the first `new` greedy tokens of each prompt. It imports nothing of ling3.
"""

import json
import os
import sys
from pathlib import Path

GROUP = 32


def main(directory: str, bits: str) -> None:
    """Loads the model, then answers until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import mlx.core as mx  # noqa: PLC0415
    from mlx import nn  # noqa: PLC0415
    from mlx_lm.models import bailing_moe_v3  # noqa: PLC0415
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415

    mx.set_default_device(mx.cpu)
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    model = bailing_moe_v3.Model(bailing_moe_v3.ModelArgs.from_dict(config))
    weights = model.sanitize(mx.load(str(Path(directory) / "model.safetensors")))
    model.load_weights([(name, weight.astype(mx.float32)) for name, weight in weights.items()])
    if bits != "32":
        nn.quantize(model, group_size=GROUP, bits=int(bits))
    mx.eval(model.parameters())
    model.eval()
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        cache, tokens, rows = make_prompt_cache(model), mx.array(asked["prompts"]), []
        for _ in range(max(asked["new"])):
            tokens = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
            mx.async_eval(tokens)
            rows.append(tokens)
        answers = mx.concatenate(rows, axis=1).tolist()
        print(json.dumps([row[:new] for row, new in zip(answers, asked["new"])]), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
