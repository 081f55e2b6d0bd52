"""Where the script does by itself what recording is in the way of."""
