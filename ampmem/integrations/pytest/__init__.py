"""Memory tests: what a test may take, as marks, a fixture and a baseline. The plugin is :mod:`.plugin`."""
