"""Options, loading and launching of kernels, memory, and the caches in memory and on disk.

May import `ir`, `scheduler` and `codegen`; knows nothing of TorchDynamo.
"""
