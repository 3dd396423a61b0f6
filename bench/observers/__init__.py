"""Cost of observation: the journal, attribution and the sidecar."""
