"""A few steps of a training that goes on, recorded, and what the training's loggers are told of them."""
