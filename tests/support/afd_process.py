"""A process of a disaggregated model that a test gives commands: `afd_process.py process sessions cards port`."""

import json
import os
import sys

import jax

PROMPTS = [[1, 5, 7], list(range(3, 43)), [9], [11, 12, 13, 14], [3, 4]]
TOKENS = 6


def model():
    """A layer of KDA and one of MLA, both with experts."""
    import dataclasses  # noqa: PLC0415

    from tiny import TINY, open_model  # noqa: PLC0415

    return open_model(dataclasses.replace(TINY, num_hidden_layers=2, layer_group_size=2, first_k_dense_replace=0))


def say(answer):
    print("answer", json.dumps(answer), flush=True)


def main(process, sessions, cards, port):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_recoverability", True)  # or the death of a process would end all others
    jax.distributed.initialize(f"127.0.0.1:{port}", sessions + cards, process)
    import ling3.afd  # noqa: PLC0415

    jax.config.update("jax_compilation_cache_dir", os.environ["PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    settings = ling3.EngineSettings(max_running_requests=4, num_pages=24, page_size=64, max_model_len=512)
    worker = ling3.afd.join(model(), attention_workers=sessions, ffn_workers=cards, settings=settings)
    say("joined")
    if isinstance(worker, ling3.afd.FfnProcess):
        worker.serve()
        say(worker.stats().rows)
        return
    with worker:
        for command in iter(sys.stdin.readline, "leave\n"):
            if command == "begin\n":
                worker.engine.submit([1, 2, 3], ling3.SamplingParams(max_tokens=200, ignore_eos=True))
                for _ in range(4):
                    worker.engine.step()
                say("begun")
                continue
            try:
                say(worker.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True))
            except ling3.afd.WorkerError as error:
                say(str(error))
    say("left")
    sys.stdin.read()  # JAX's coordinator is in the first process, whose end would end the others


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
