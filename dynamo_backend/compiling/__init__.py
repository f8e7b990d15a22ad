"""A graph of the IR to kernels and a host program."""
