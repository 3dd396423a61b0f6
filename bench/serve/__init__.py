"""Cost of rail faults to the requests of a server, for r2ccl and other transports."""
