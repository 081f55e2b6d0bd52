"""Memory tests: limits for the memory of a test, as marks, a fixture and a baseline. The plugin is :mod:`.plugin`."""
