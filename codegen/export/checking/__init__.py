"""What is checked of a call before anything runs, in LLVM IR."""
