"""Scalar functions as instructions: written inline, or called."""
