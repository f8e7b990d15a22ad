"""How much of the difference between compiled models and eager the named places explain."""
