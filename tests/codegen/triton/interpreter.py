"""A process that runs kernels under Triton's interpreter: jobs come on stdin, answers go to stdout, both pickled.

The interpreter has to be chosen before Triton is imported, hence the process.
"""

import os
import pickle
import sys

os.environ["TRITON_INTERPRET"] = "1"

import ml_dtypes
import numpy as np
import torch

from torch_mlc.runtime.interpreter.launching import launch, launch_table

# Types that NumPy has of ``ml_dtypes``, which torch takes as bits.
FOREIGN = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _tensor(array, strides, dtype):
    """A torch tensor of an array's content in memory of the given strides; an expanded dimension has one element."""
    shape = array.shape
    array = array[tuple(slice(0, 1) if n and not stride else slice(None) for n, stride in zip(shape, strides))]
    kind, array = getattr(torch, dtype), np.ascontiguousarray(array).reshape(array.shape)
    content = (
        torch.from_numpy(array.view(f"u{array.itemsize}")).view(kind) if dtype in FOREIGN else torch.from_numpy(array)
    )
    return torch.empty_strided(array.shape, strides, dtype=kind).copy_(content).expand(shape)


def _array(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in FOREIGN:
        return tensor.numpy().copy()
    bits = getattr(torch, f"uint{8 * tensor.element_size()}")
    return tensor.contiguous().view(bits).numpy().view(getattr(ml_dtypes, name))


def _run_table(job):
    source = job["source"]
    rows = [[_tensor(*p) for p in params] for params in job["rows"]]
    for aligned in launch_table(source, job["target"], rows, job["sizes"]):
        assert aligned == tuple(True for _ in source.params), "memory of torch is aligned"
    return [[_array(row[k]) for k in job["outputs"]] for row in rows]


def _run(job):
    if "rows" in job:
        return _run_table(job)
    tensors = [_tensor(*p) for p in job["params"]]
    launch(job["source"], job["grid"], tensors, job["sizes"])
    return [_array(tensors[k]) for k in job["outputs"]]


def main() -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            job = pickle.load(source)
        except EOFError:
            return
        try:
            answer = ("ok", _run(job))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}\n{job['source'].text}")
        pickle.dump(answer, sink)
        sink.flush()


if __name__ == "__main__":
    main()
