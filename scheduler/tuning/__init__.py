"""Tuning: measuring what rules offer, and keeping what was measured."""
