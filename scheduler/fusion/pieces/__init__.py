"""Functions that become two kernels on GPUs: one for pieces, and one for what combines them."""
