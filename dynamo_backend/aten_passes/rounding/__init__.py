"""Which values are rounded before they are read, and maxima that a backward asks for."""
