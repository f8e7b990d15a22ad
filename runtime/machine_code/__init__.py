"""What the machine code of GPU kernels tells without a GPU: its instructions, its loops, and how often each runs."""
