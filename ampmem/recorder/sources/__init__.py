"""Sources of allocator events; each fulfils :class:`~ampmem.recorder.sources.base.Source`."""
