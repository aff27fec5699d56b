"""Is a bundle right, is it fast enough, is it good: what `skip-validate` measures, one question a module."""
