"""What primitives ask of a nest: loops and blocks, regions, dependences, contractions."""
