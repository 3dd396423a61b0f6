"""Plugins, one folder an inference engine; the only part of r2serve that imports an engine."""
