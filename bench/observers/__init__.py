"""What it costs to be observed: the journal, attribution and the sidecar."""
