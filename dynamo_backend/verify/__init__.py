"""``MLC_VERIFY``: graphs and kernels that are checked while they run."""
