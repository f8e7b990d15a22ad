"""Passes that find attention and write it as one reduction."""
