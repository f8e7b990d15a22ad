"""LLVM functions under construction: instructions, types, control flow, and what all parts share."""
