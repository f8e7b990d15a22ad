"""Caches on disk and in a shared place, and what their keys are made of."""
