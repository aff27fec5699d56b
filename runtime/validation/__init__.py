"""What `skip-validate` measures: is a bundle correct, fast enough, good enough? One question per module."""
