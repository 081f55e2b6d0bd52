"""A generator and a discriminator that train against each other, each with an optimizer of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ampmem.workloads.common import WorkloadOptions, command, make_optimizer, report_step

LEARNING_RATE = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the models and of one batch; images are ``(3, 32, 32)``."""

    latent: int
    channels: int
    batch_size: int


PRESETS = {
    "tiny": Config(latent=16, channels=8, batch_size=4),
    "small": Config(latent=100, channels=64, batch_size=8),
    "full": Config(latent=128, channels=256, batch_size=128),
}


class Generator(nn.Module):
    """Noise to images."""

    def __init__(self, latent: int, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.ConvTranspose2d(latent, 4 * channels, 4, bias=False),
            nn.BatchNorm2d(4 * channels),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4 * channels, 2 * channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * channels, channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(channels, 3, 4, stride=2, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """``(batch, latent)`` to images ``(batch, 3, 32, 32)``."""
        images: Tensor = self.net(noise[:, :, None, None])
        return images


class Discriminator(nn.Module):
    """Images to one logit each: positive for real."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * channels, 4 * channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4 * channels),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4 * channels, 1, 4),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images ``(batch, 3, 32, 32)`` to logits ``(batch,)``."""
        logits: Tensor = self.net(images)
        return logits.flatten()


def build(options: WorkloadOptions) -> tuple[tuple[Generator, Discriminator], tuple[Optimizer, Optimizer], Tensor]:
    """Generator and discriminator, their optimizers in that order, and real images ``(batch, 3, 32, 32)``."""
    torch.manual_seed(options.seed)
    config = PRESETS[options.preset]
    generator = Generator(config.latent, config.channels).to(options.device)
    discriminator = Discriminator(config.channels).to(options.device)
    name = options.optimizer or "adam"
    optimizers = (
        make_optimizer(name, generator.parameters(), lr=LEARNING_RATE),
        make_optimizer(name, discriminator.parameters(), lr=LEARNING_RATE),
    )
    real = torch.randn(options.batch_size or config.batch_size, 3, 32, 32).tanh()
    return (generator, discriminator), optimizers, real.to(options.device)


def discriminator_loss(discriminator: Discriminator, real: Tensor, fake: Tensor) -> Tensor:
    """The loss for telling real from fake images (both ``(batch, 3, 32, 32)``); a scalar."""
    on_real, on_fake = discriminator(real), discriminator(fake.detach())
    return F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real)) + F.binary_cross_entropy_with_logits(
        on_fake, torch.zeros_like(on_fake)
    )


def generator_loss(discriminator: Discriminator, fake: Tensor) -> Tensor:
    """The loss for fake images ``(batch, 3, 32, 32)`` that the discriminator recognises; a scalar."""
    on_fake = discriminator(fake)
    return F.binary_cross_entropy_with_logits(on_fake, torch.ones_like(on_fake))


def train(options: WorkloadOptions) -> None:
    """Train a generator and a discriminator on random images."""
    (generator, discriminator), (generator_optimizer, discriminator_optimizer), real = build(options)
    latent = PRESETS[options.preset].latent
    scaler = options.grad_scaler()
    for step in range(options.steps):
        noise = torch.randn(len(real), latent, device=options.device)
        with options.autocast():
            fake = generator(noise)
            d_loss = discriminator_loss(discriminator, real, fake)
        discriminator_optimizer.zero_grad()
        scaler.scale(d_loss).backward()
        scaler.step(discriminator_optimizer)

        with options.autocast():
            g_loss = generator_loss(discriminator, fake)
        generator_optimizer.zero_grad()
        scaler.scale(g_loss).backward()
        scaler.step(generator_optimizer)
        scaler.update()
        report_step(step, d_loss.item() + g_loss.item())


main = command("gan", train, optimizer="adam")


if __name__ == "__main__":
    main()
