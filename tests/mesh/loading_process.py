"""One of two processes of two devices each, which load and save together: `loading_process.py process port directory`.

The directory has the same checkpoints for each process, but where one of them is damaged for the second. What the
process finds goes to stdout as JSON.
"""

import json
import os
import pathlib
import resource
import sys

import jax
import numpy as np


def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def counted(reads):
    """`os.preadv` and `os.pread`, whose bytes are added to the list `reads`."""
    preadv, pread = os.preadv, os.pread

    def counted_preadv(file, buffers, offset):
        reads.append(preadv(file, buffers, offset))
        return reads[-1]

    def counted_pread(file, length, offset):
        found = pread(file, length, offset)
        reads.append(len(found))
        return found

    os.preadv, os.pread = counted_preadv, counted_pread


def own_bytes(model, whole, shares):
    """What this process has of a model on the mesh, equal parts once; each is that of the `whole` model."""
    total = 0
    for share, array, value in zip(shares, jax.tree.leaves(model), jax.tree.leaves(whole), strict=True):
        seen = set()
        for shard in array.addressable_shards:
            number = share.number(shard.index)
            assert np.array_equal(np.asarray(shard.data), share.part(np.asarray(value), number))
            first, end = share.spans[number] if share.spans else (0, 1)
            if (first, end) not in seen:
                total += value.nbytes * (end - first) // (value.shape[share.axis] if share.spans else 1)
            seen.add((first, end))
    return total


def main(process, port, directory):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    jax.config.update("jax_compilation_cache_dir", os.environ["PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    import ling3  # noqa: PLC0415
    from ling3.mesh import Rules, plan  # noqa: PLC0415

    own, found = directory / str(process), {}
    mesh = jax.make_mesh((1, 4), ("data", "tensor"))

    def failure(act):
        """The error of `act`: its type, its text and its notes."""
        try:
            act()
        except Exception as error:
            return [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
        return None

    reads, whole = [], ling3.load(own / "small")
    counted(reads)
    for sums in (False, True):
        rules = Rules(sums=sums)
        reads.clear()
        model = ling3.load(own / "small", mesh=mesh, rules=rules)
        read = sum(reads)
        found[f"read {sums}"] = {"bytes": read, "own": own_bytes(model, whole, plan(whole, mesh, rules).shares)}
        ling3.save(model, directory / f"saved {sums}", max_shard_bytes=30_000)

    before = peak()
    reads.clear()
    large = ling3.load(own / "large", mesh=mesh)
    shard = sum(part.data.nbytes for array in jax.tree.leaves(large) for part in array.addressable_shards)
    largest = max(part.data.nbytes for array in jax.tree.leaves(large) for part in array.addressable_shards)
    found["large"] = {"grown": peak() - before, "shard": shard, "largest": largest, "bytes": sum(reads)}
    del large

    for name in ("missing", "cut", "infinite", "another"):
        found[name] = failure(lambda name=name: ling3.load(own / name, mesh=mesh))
    found["taken"] = failure(lambda: ling3.save(model, directory / "saved False"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # no more can be written to a file
    found["full"] = failure(lambda: ling3.save(model, directory / "full", check_finite=False))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    alone = jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[2:])
    if process == 1:  # a mesh of one process concerns no other
        ling3.save(ling3.load(own / "small", mesh=alone), directory / "saved alone")
    else:
        found["foreign"] = failure(lambda: ling3.load(own / "small", mesh=alone))
    print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
