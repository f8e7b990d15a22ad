"""The host program as LLVM IR."""
