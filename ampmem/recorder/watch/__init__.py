"""A whole run, watched at a price that nobody notices: gauges, light hooks, and full recordings now and then."""
