"""Schedule primitives: each rewrites a nest into one of the same meaning, or refuses. One file a primitive."""
