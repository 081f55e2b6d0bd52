"""Where allocator events come from; every source fulfils :class:`~ampmem.recorder.sources.base.Source`."""
