"""The rank of this process, and how the ranks of a job stop together."""
