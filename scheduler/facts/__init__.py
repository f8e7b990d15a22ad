"""What is so of a graph, computed and never decided: order, views, definitions, domains, contractions."""
