"""Memory of CPUs that is used again, and memory that is new in large pages."""
