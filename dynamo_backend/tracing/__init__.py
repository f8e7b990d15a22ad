"""What torch's tracing needs and leaves behind: origins, hints, tokens, stand-ins."""
