"""Changes forced on a script: a precision, by torch's autocast and GradScaler, and changes that save memory."""
