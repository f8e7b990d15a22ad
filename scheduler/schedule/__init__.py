"""Schedules: a nest, the primitives that rewrite it, their trace, and schedules by hand."""
