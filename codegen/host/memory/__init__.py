"""The memory of a host program: what is held when, and where it lies."""
