"""Watches a whole run at little cost: gauges, light hooks, and a full recording from time to time."""
