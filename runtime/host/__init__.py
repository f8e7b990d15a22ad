"""Host programs in this process: loaded, called, captured, switched."""
