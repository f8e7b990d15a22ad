"""Triton source to machine code, in this process and in others."""
