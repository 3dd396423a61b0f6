"""`r2serve demo`: serves a tiny model over two nodes and takes rails away while it decodes."""
