"""Plugins, a folder for each inference engine; no other part of r2serve imports an engine."""
