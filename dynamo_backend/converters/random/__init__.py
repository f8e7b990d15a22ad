"""Random numbers, draws of categories, and replays of both."""
