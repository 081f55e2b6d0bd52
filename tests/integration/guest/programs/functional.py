"""torch.func and forward-mode AD, in a model's forward and beside it."""

import torch
import torch.autograd.forward_ad as forward_ad
from _training import small_model, train
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap


class Inside(nn.Module):
    """Uses torch.func in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()

    def forward(self, x: Tensor) -> Tensor:
        slopes = vmap(grad(lambda row: self.body(row).square().sum()))(x)
        return self.body(x + slopes)


model = Inside()
train(model)
weights = dict(model.named_parameters())
batch = torch.linspace(-1, 1, 32).view(4, 8)


def loss_of(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
    """The loss of ``rows``."""
    return functional_call(model, weights, rows[None]).square().mean()


each = vmap(grad(loss_of), in_dims=(None, 0))(weights, batch)
print({name: round(value.sum().item(), 6) for name, value in each.items()})
print(jacrev(model.body)(batch[0]).sum().item(), hessian(lambda x: model.body(x).sum())(batch[0]).sum().item())
print([value.sum().item() for value in jvp(model.body, (batch,), (batch,))])
outputs, back = vjp(model.body, batch)
print(back(outputs)[0].sum().item())
with forward_ad.dual_level():
    dual = forward_ad.make_dual(batch, torch.ones_like(batch))
    print(forward_ad.unpack_dual(model.body(dual)).tangent.sum().item())
train(model, loss_of=lambda x: model(x).sum() + sum(value.sum() for value in grad(loss_of)(weights, x[0]).values()))
