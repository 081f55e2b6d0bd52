"""Facts that hooks report, stored cheaply (integers in lists, each text once), and the addresses of tensors."""
