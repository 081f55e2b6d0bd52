"""What the analysis finds as JSON: written, read again, and described by schemas."""
