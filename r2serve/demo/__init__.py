"""`r2serve demo`: serves a tiny model over two nodes and fails rails during decoding."""
