"""Everything that is hooked or patched in torch while a session records, one module per place."""
