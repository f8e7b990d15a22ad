"""What is told of a compiled model: kernels, calls, traffic, and schedules that were for none."""
