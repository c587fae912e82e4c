"""A generative adversarial network on handwritten digits: two competing models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsjob.errors import ContractError

PIXELS = 8


class Generator(nn.Module):
    """Generates images from noise."""

    def __init__(self, width: int = 128, latent: int = 16) -> None:
        super().__init__()
        self.latent = latent
        self.layers = nn.Sequential(
            nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, PIXELS**2)
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Float [B, latent] to images, [B, 1, 8, 8], from 0 to 1."""
        images: Tensor = self.layers(noise).view(-1, 1, PIXELS, PIXELS).sigmoid()
        return images


class Discriminator(nn.Module):
    """Distinguishes real images from generated ones."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS**2, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Images, float [B, 1, 8, 8], to logits, [B, 1]: positive for images that look real."""
        logits: Tensor = self.layers(images.flatten(1))
        return logits


def step(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One step of the `discriminator` on real and generated `images`, then one of the `generator` (Goodfellow's
    non-saturating loss).

    Returns:
        `loss`, the generator's, and the `discriminator`'s.
    """
    generator, discriminator = engines["generator"], engines["discriminator"]
    if generator.rhythm.accumulation > 1:
        raise ContractError(
            "the generator's pass leaves gradients in the discriminator, where accumulated ones would be",
            hint="trainer.grad_accum=1",
        )
    real = batch["images"]
    made = generator(torch.randn(len(real), generator.module.latent, device=real.device)).float()
    logits = discriminator(torch.cat([real, made.detach()])).float()
    on_real, on_made = logits.split(len(real))
    against = F.softplus(-on_real).mean() + F.softplus(on_made).mean()
    discriminator.backward(against)
    discriminator.step()
    with discriminator.no_sync():  # only the generator's gradients are needed, so skip reducing the discriminator's
        logits = discriminator(made).float()
    loss = F.softplus(-logits).mean()
    generator.backward(loss)
    generator.step()
    discriminator.zero_grad()
    return {"loss": loss, "discriminator": against}


def evaluate(engines: Mapping[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`distance`: the mean Euclidean distance from generated images to the nearest real image of the batch."""
    real, generator = batch["images"], engines["generator"]
    seeded = torch.Generator().manual_seed(0)
    made = generator(torch.randn(len(real), generator.module.latent, generator=seeded).to(real.device)).float()
    return {"distance": torch.cdist(made.flatten(1), real.flatten(1)).min(dim=1).values.mean()}
