"""What a rail's loss costs the requests of a server, beside other ways to serve."""
