"""Functions that are taken apart into two kernels, on GPUs: pieces and what combines them, first and later visits."""
