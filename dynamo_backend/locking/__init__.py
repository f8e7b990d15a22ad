"""The lock file: every decision of a model as one text, written, checked against, and taken again."""
