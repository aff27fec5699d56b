"""Operators that no library offers, one folder each (reference, kernel, host code). The cpu target needs none."""
