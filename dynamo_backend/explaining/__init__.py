"""``torch_mlc.explain``: a model compiled and run once, and what became of it."""
