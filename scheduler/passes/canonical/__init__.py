"""Passes that leave the same program in fewer or plainer nodes."""
