"""Graph passes, one file each; the pass, its file and its function share one verb."""
