"""Checks that run in processes of their own, since they may crash or hang, and what they tell."""
