"""One compiled graph for all numbers of tokens, beside one that is compiled for each."""
