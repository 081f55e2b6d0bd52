"""ampmem inside other people's programs. Each module imports its host, which is an optional extra, only when used."""
