"""Tensors of every kind that torch has, in a model's forward."""

import warnings

import torch
from _training import small_model, train
from torch import Tensor, nn

warnings.simplefilter("ignore")


class Kinds(nn.Module):
    """Uses them beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("rows", torch.eye(4).to_sparse_csr())
        self.register_buffer("meta", torch.ones(4, device="meta"))
        self.register_buffer("complex", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = torch.sparse.mm(self.sparse, y) + self.rows.to_dense() @ y
        y = y + (y * self.complex).abs() + self.quantized.dequantize()
        print(tuple((self.meta + 1).shape), self.sparse.is_coalesced())
        y = y + torch.view_as_real(torch.fft.fft(y)).sum(-1)
        if torch.backends.mkldnn.is_available():
            y = y + torch.ones(4, 4).to_mkldnn().to_dense()
        nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
        y = y + (nested * 2).values().sum()
        return y.conj() + torch._neg_view(y.detach()) + torch.empty(0, 4).sum()


train(Kinds())
