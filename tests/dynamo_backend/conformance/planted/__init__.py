"""Backends that are wrong on purpose, each in one way, and the cases that have to find it.

Most wrap torch's own `aot_eager`: what it compiles is right, and what is planted is all that is wrong.
"""
