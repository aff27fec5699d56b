"""The skipdecode runtime."""
