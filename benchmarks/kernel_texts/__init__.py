"""The texts of all kernels and host programs of the corpus, written before a refactoring and compared after it."""
