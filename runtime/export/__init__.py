"""Models as libraries: written to a folder, and opened again without torch."""
