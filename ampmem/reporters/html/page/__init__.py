"""The page itself: templates, style, script, and what keeps it safe."""
