"""What cases are made of: a case, the backend under test, and what is seen of a run."""
