"""Changes torch's defaults: dtype, device, determinism, gradients, threads."""

import torch
from _training import small_model, train

torch.set_default_dtype(torch.float64)
train(small_model())
torch.use_deterministic_algorithms(True, warn_only=False)
train(small_model())
torch.set_default_device("meta")
with torch.device("cpu"):
    train(small_model())
torch.set_default_device(None)
with torch.device("cpu"):
    train(small_model())
torch.set_grad_enabled(False)
with torch.enable_grad():
    train(small_model())
print(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads())
print(torch.are_deterministic_algorithms_enabled(), torch.is_inference_mode_enabled())
