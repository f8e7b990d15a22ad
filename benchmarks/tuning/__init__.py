"""The suite ``tuning``: what schedules take, recorded once, and how models and strategies do on it."""
