"""Benchmarks of torch-mlc: ``python -m benchmarks --suite kernels|models|compile|...`` (README.md)."""
