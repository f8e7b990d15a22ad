"""Rules for GPUs, one file for each kind of nest."""
