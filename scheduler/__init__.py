"""What goes into one kernel, and how its loops run: fusion, schedules and their traces, default rules, search.

Imports `torch_mlc.ir` alone. A scheduled kernel is still loop IR; measuring on hardware is handed in as a `Measurer`.
"""
