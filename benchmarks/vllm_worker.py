"""vLLM behind a pipe: `PYTHON vllm_worker.py CHECKPOINT DTYPE`, with the Python of an environment that has vLLM.

Each line of JSON on stdin, {"prompts": [[id, …], …], "new": [n, …]}, is answered by a line on stdout: the first `new`
greedy tokens of each prompt. Output of vLLM itself goes to stderr. It imports nothing of ling3.
"""

import json
import os
import sys

CACHE_GB = "2"


def main(directory: str, dtype: str) -> None:
    """Loads the model, then answers until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process, next to the pipe
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = CACHE_GB
    cores = os.cpu_count() or 1
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{cores - 1}"  # all cores: by default some stay idle
    os.environ["OMP_NUM_THREADS"] = str(cores)  # by default torch gets only one
    from vllm import LLM, SamplingParams  # noqa: PLC0415 -- its import reads the settings above

    model = LLM(
        directory,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=False,  # the same prompts are measured again and again
        seed=0,
    )
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        wanted = [
            SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False) for new in asked["new"]
        ]
        outputs = model.generate(prompts, wanted, use_tqdm=False)
        print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
