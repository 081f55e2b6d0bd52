"""What ``torch.cuda`` answers on a GPU that is not there."""
