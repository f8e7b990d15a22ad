"""Elements from other places: views, joins, gathers, scatters, windows, orders."""
