"""ampmem inside other programs. Each module imports its host, an optional extra, only when used."""
