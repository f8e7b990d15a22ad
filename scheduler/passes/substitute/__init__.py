"""Graph substitution: the same results by other products, where a model of time says that these are faster."""
