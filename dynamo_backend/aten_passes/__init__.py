"""Graphs of ATen ops to graphs of ATen ops: ops in simpler ones, and what is better known before the import."""
