"""The console scripts of the runtime."""
