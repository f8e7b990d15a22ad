"""Data and meaning of the compiler: types, expressions, loop nests, graphs, and the oracle that defines them.

Nothing in here imports another package of the project.
"""
