"""Passes over convolutions: their layouts, and which become loops or products."""
