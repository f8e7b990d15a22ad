"""Keys of graphs and AOTAutograd's cache: what is found again, in this process or another."""
