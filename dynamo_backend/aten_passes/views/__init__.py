"""Views, and values that are written over."""
