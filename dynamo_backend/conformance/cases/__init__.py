"""The cases, one file a topic."""
