"""The events of a recording, packed for the page."""
