"""Writes into views, of tensors for which torch keeps how a view is made: it asks for the view's node in between."""

import torch
from _training import small_model, train
from torch import Tensor, nn

model = small_model()


def padded(batch: Tensor) -> Tensor:
    out = model(batch)
    packed = nn.utils.rnn.pack_padded_sequence(out.view(2, 2, 4), torch.tensor([2, 1]), batch_first=True)
    whole, lengths = nn.utils.rnn.pad_packed_sequence(packed)
    print(lengths.tolist(), type(whole.grad_fn).__name__)
    rows = torch.zeros(4, 4)
    for row, value in zip(rows.unbind(), out.unbind(), strict=True):
        row.detach().copy_(value)
    rows[:2].mul_(2).add_(out[2:])
    rows.select(0, 3).copy_(out[0])
    return whole.square().mean() + rows.square().sum()


train(model, loss_of=padded)
