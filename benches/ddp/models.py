"""The two models that the DDP benches train: one is bound by memory bandwidth, one by arithmetic."""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> nn.Module:
    """784-4096-4096-10: 20 M parameters, 80 MB of gradients, in few large tensors."""
    return nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = torch.relu(self.norm1(self.conv1(x_BCHW)))
        return torch.relu(self.norm2(self.conv2(y_BCHW)) + self.shortcut(x_BCHW))


def resnet18() -> nn.Module:
    """ResNet-18 for 32x32 images: 11 M parameters, 45 MB of gradients, in 62 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels_in = 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels_in, channels, stride), Block(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def batch(name: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels for one of the models."""
    x = torch.randn(64, 784, generator=generator) if name == "mlp" else torch.randn(16, 3, 32, 32, generator=generator)
    return x, torch.randint(0, 10, (len(x),), generator=generator)


MODELS = {"mlp": mlp, "resnet18": resnet18}
