"""Graphs with symbolic sizes as several programs, one for each region of sizes."""
