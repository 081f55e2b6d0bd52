"""Whose memory is it inside compiled code? The texts that Inductor generates say so."""
