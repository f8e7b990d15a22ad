"""The command line, `python -m torch_mlc`: info, cache and demo."""
