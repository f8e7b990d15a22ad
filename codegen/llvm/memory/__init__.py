"""Indices, loads, stores, and what is proved of them."""
