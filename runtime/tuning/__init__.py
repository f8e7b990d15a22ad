"""Candidates of tuning: run in a process of their own, and timed."""
