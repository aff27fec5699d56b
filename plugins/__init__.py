"""What standard operators cannot do, one folder each (header, kernel, host version). The cpu target needs none of it."""
