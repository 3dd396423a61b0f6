"""An engine that serves over the nodes of a lab, and the requests that load it."""
