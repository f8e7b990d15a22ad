"""Values that a program is given beside its arguments, computed once and kept."""
