"""The sidecar: what the workers of this node recorded, over HTTP.  It only reads."""
