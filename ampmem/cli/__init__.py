"""The command line: one module per subcommand, and ``main`` in front of them."""
