"""What work costs on a machine, and which of two ways is taken for it."""
