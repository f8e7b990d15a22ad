"""Checks of any backend of `torch.compile`: small programs, each for one thing that backends get wrong.

`plugin.py` is loaded by every pytest run of an environment that has torch-mlc, and so imports nothing but pytest.
"""
