"""What mixed precision made of the memory: recordings side by side, and the answer that is said first."""
