"""Rules for CPUs, one file for each kind of nest."""
