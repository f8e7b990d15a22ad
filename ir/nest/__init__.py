"""Loop nests: loops and blocks over buffers."""
