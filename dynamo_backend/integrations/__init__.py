"""Adapters to programs that take a compiler: each speaks its protocol and asks for nothing of it but that."""
