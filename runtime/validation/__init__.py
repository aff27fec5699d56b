"""What `skip-validate` measures: is a bundle right, is it fast enough, is it good? One question per module."""
