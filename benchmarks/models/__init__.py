"""Hand-written models, one file each, in plain PyTorch with random weights."""
