"""The host program as Python text."""
