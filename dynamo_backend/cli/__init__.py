"""The command line, `torch-mlc` or `python -m torch_mlc`: demo, info, doctor, cache, tune and options."""
