"""A model as a shared library: what is exported, and the library's own runtime."""
