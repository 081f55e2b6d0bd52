"""A loop in plain PyTorch around models for pictures: timm's, diffusers', and a network of its own."""

import argparse
from collections.abc import Callable

import torch
from resnet import resnet50
from sums import watch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

Loss = Callable[[], Tensor]


def classifier(model: nn.Module, device: str) -> Loss:
    def loss() -> Tensor:
        pictures = torch.randn(4, 3, 64, 64, device=device)
        return cross_entropy(model(pictures), torch.randint(10, (4,), device=device))

    return loss


def diffusion(model: nn.Module, device: str, *, text: bool) -> Loss:
    """Noise of a random step is predicted, from a text or from a class."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()

    def loss() -> Tensor:
        latents = torch.randn(2, 4, 16, 16, device=device)
        noise = torch.randn_like(latents)
        steps = torch.randint(0, scheduler.config.num_train_timesteps, (2,), device=device)
        given = torch.randn(2, 7, 32, device=device) if text else torch.randint(10, (2,), device=device)
        predicted = model(scheduler.add_noise(latents, noise, steps), steps, given).sample
        return mse_loss(predicted.float(), noise)

    return loss


def model_of(name: str) -> nn.Module:
    if name == "resnet":
        return resnet50()
    if name == "unet":
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            cross_attention_dim=32,
            attention_head_dim=8,
            norm_num_groups=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        )
    if name == "dit":
        from diffusers import DiTTransformer2DModel

        return DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            num_layers=2,
            sample_size=16,
            patch_size=2,
            num_embeds_ada_norm=10,
            norm_num_groups=8,
        )
    import timm

    return timm.create_model(name, num_classes=10, **({"img_size": 64} if name.startswith("vit") else {}))


parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

torch.manual_seed(0)
model = model_of(given.model).to(given.device).train()
watch(model)
if given.model in ("unet", "dit"):
    compute = diffusion(model, given.device, text=given.model == "unet")
else:
    compute = classifier(model, given.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(2):
    with torch.autocast(given.device, dtype=torch.bfloat16):
        loss = compute()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
