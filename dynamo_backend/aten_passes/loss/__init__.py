"""Linear + cross-entropy by chunks of rows."""
