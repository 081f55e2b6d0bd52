"""What is forced on a script: a precision, by torch's own autocast and GradScaler, and changes that save memory."""
