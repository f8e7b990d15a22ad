"""The suite ``generate``: steps of language models."""
