"""Element by element: arithmetic, logic, special functions, and tensors made of numbers."""
