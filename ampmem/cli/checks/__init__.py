"""What ``ampmem check`` does beside judging: run the script, find the baseline of each run, tell GitHub."""
