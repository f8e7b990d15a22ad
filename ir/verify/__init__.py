"""The rules of the IR, and the error that shows which one is broken where."""
