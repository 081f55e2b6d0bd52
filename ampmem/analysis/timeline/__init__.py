"""From events to allocations with a category, and what is alive at every instant."""
