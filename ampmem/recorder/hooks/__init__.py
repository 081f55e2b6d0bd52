"""Hooks and patches installed in torch while a session records, one module per subject."""
