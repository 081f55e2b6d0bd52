"""Which process of a job this is, and how the ranks of a job end together."""
