"""Memory that several nodes of a fused graph write, each a slice of it, as two calls that run nothing.

``MEMORY`` makes a tensor whose elements nobody has written yet. Views of it are the slices, into which kernels write
(``CallTensor.into``). ``JOINED`` takes the tensor and what was written, and gives the tensor as it is then: whoever
reads all of it reads that, and so comes after those that write.
"""

MEMORY, JOINED = "mlc::memory", "mlc::joined"
# Both are for the order of nodes and for the memory, and no work of any library.
NOTHING = frozenset((MEMORY, JOINED))
