"""Host programs of libraries: everything is an address, and no process of Python's is around them."""
