"""The entry point: settings, AOTAutograd, the partition, and the path of one graph."""
