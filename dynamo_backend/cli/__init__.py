"""The command line, `torch-mlc` or `python -m torch_mlc`: demo, info, cache, tune and options."""
