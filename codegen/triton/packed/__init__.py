"""Elements narrower than a register: bits of a byte, and half types two at a time."""
