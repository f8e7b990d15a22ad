"""Models with weights of four or eight bits: modules whose forward is ordinary PyTorch over a layout for kernels."""
