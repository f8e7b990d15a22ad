"""What of an ATen graph does not change between calls: found, brought together, and taken out of the graph."""
