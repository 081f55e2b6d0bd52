"""From events to allocations with a category, and the live bytes at every instant."""
