"""The IR as script: printing it, reading it back, and keys that equal functions share."""
