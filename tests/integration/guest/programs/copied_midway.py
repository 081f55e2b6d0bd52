"""Copies, pickles and shares its model and optimizer in the middle of training."""

import copy
import io
import pickle
import pickletools

import torch
from _training import small_model, train

model = small_model()
optimizer = torch.optim.AdamW(model.parameters())


def names_in(data: bytes) -> list[str]:
    """What a pickle names: no code of anybody else's is to be among it."""
    texts = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    return sorted(text for text in texts if "ampmem" in text or "hook" in text)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    twin, their = copy.deepcopy((model, optimizer))
    print("copied", twin[0].weight._post_accumulate_grad_hooks, sorted(vars(twin[0].weight)))
    twin(batch).sum().backward()
    their.step()
    for value in (model, optimizer, model[0].weight, model.state_dict(), optimizer.state_dict()):
        data = pickle.dumps(value)
        print("pickled", len(data), names_in(data), type(pickle.loads(data)).__name__)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    print("saved", len(buffer.getvalue()))
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    print("loaded", loaded[0].weight._post_accumulate_grad_hooks, torch.equal(loaded[0].weight, model[0].weight))
    return loss


train(model, optimizer, loss_of=loss_of)
shared = copy.deepcopy(model).share_memory()
train(shared)
print(shared[0].weight.is_shared(), [len(each._forward_hooks) for each in model.modules()])
