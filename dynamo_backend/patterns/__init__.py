"""Sub-graphs of ATen ops that users have registered, and what takes their place."""
