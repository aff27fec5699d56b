"""Engines: compiled segments, one file a library."""
