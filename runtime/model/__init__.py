"""The time of a kernel on a GPU that need not be here, from its machine code and the sheet of the machine."""
