"""Settings: one table of fields, their values, and variables of the environment."""
