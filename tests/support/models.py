"""Models of many forms for pipelines, in float64.

Each function in `MODELS` makes a `Case`. Its body serves as an `smp.step` function and, for the comparison, runs in a
plain loop over microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 16


@dataclass
class Case:
    """A model with its inputs and the modules that can go to different partitions."""

    model: nn.Module
    #: Modules in the order of the forward. A partition gets consecutive ones.
    pieces: list[nn.Module]
    #: Returns the arguments of a step, given its number.
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    #: `body(model, *arguments)` returns the loss, then other values to compare.
    body: Callable[..., tuple[Any, ...]]
    #: Indices of pieces that must be on one partition.
    together: tuple[int, ...] = ()


def _normal(*shapes: tuple[int, ...]) -> Callable[[int], tuple[torch.Tensor, ...]]:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(step)
        return tuple(torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64) for shape in shapes)

    return batch


def _ids(count: int, length: int, vocabulary: int = 40) -> Callable[[int], tuple[torch.Tensor, ...]]:
    def batch(step: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(step)
        return tuple(torch.randint(1, vocabulary, (BATCH, length), generator=generator) for _ in range(count))

    return batch


def _regression(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    output = model(x)
    return F.mse_loss(output, y), output


class MLP(nn.Module):
    """Functions between layers, and a parameter of the root module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return self.head(x)


def mlp() -> Case:
    model = MLP()
    return Case(model, [*model.layers, model.head], _normal((12,), (4,)), _regression)


def sequential() -> Case:
    model = nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 4)
    )
    return Case(model, list(model), _normal((12,), (4,)), _regression)


class Block(nn.Module):
    """ResNet's basic block, with in-place activations."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, norm: bool = True) -> None:
        super().__init__()
        normalize = nn.BatchNorm2d if norm else (lambda width: nn.GroupNorm(2, width))
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = normalize(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = normalize(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), normalize(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet-18 with torchvision's structure and few channels."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for number in range(1, 5):
            stride = 1 if number == 1 else 2
            setattr(
                self,
                f"layer{number}",
                nn.Sequential(Block(widths[number - 1], widths[number], stride), Block(widths[number], widths[number])),
            )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18() -> Case:
    model = ResNet18()
    pieces = [model.conv1, model.bn1, *model.layer1, *model.layer2, *model.layer3, *model.layer4, model.fc]
    return Case(model, pieces, _normal((1, 16, 16), (4,)), _regression)


class Inner(nn.Module):
    """A module whose two layers may be on different partitions, with a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gate = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor, *, add: float) -> torch.Tensor:
        return self.down(F.silu(self.up(x))) * self.gate + x + add


class Derived(Inner):
    """Calls `super().forward`."""

    def forward(self, x: torch.Tensor, *, add: float) -> torch.Tensor:
        return torch.sin(super().forward(x, add=add))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner(10)
        self.middle = nn.ModuleDict({"a": Derived(10), "b": Inner(10)})
        self.head = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x, add=0.5)
        for key in ("a", "b"):
            x = self.middle[key](x, add=0.0)
        return self.head(x)


def nested() -> Case:
    model = Nested()
    pieces = []
    for inner in (model.first, model.middle["a"], model.middle["b"]):
        pieces += [inner.up, inner.down]
    return Case(model, [*pieces, model.head], _normal((10,), (4,)), _regression)


class Skip(nn.Module):
    """The output of the first layer is used at the start, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        second = self.layers[1](torch.relu(first))
        third = self.layers[2](second + first)
        fourth = self.layers[3](torch.cat([third[:, :5], first[:, 5:]], 1))
        return self.layers[4](fourth * first + second)[:, :4]


def skip() -> Case:
    model = Skip()
    return Case(model, list(model.layers), _normal((10,), (4,)), _regression)


class Tied(nn.Module):
    """The root module uses the weight of the embedding as its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.linear(x, self.words.weight)


def _language(model: nn.Module, ids: torch.Tensor) -> tuple[Any, ...]:
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1)), logits


def tied() -> Case:
    model = Tied()
    return Case(model, [model.words, *model.layers], _ids(1, 6), _language)


class TwoByTwo(nn.Module):
    """Two inputs and two outputs, of which one is not part of the loss, and an argument that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(5, 8)
        self.mix, self.out, self.idle = nn.Bilinear(8, 8, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, z: torch.Tensor, unused: Any = None) -> tuple[torch.Tensor, ...]:
        left, right = self.left(x), self.right(z)
        mixed = self.mix(left, right)
        return self.out(mixed), self.idle(mixed)


def two_by_two() -> Case:
    model = TwoByTwo()

    def body(model: nn.Module, x: torch.Tensor, z: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        output, idle = model(x, z=z, unused=y)
        loss = F.mse_loss(output, y)
        loss /= 3
        return loss, output, idle

    pieces = [model.left, model.right, model.mix, model.out, model.idle]
    return Case(model, pieces, _normal((6,), (5,), (4,)), body)


class Dictionaries(nn.Module):
    """The model and its submodules take and return nested structures."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            hidden = self.linear(state["hidden"])
            return {
                "hidden": torch.relu(hidden),
                "all": [*state["all"], hidden],
                "depth": state["depth"] + 1,
                "none": None,
            }

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(4))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"hidden": x, "all": [], "depth": 0}
        for part in self.parts:
            state = part(state)
        return {"logits": self.head(state["hidden"]), "sum": sum(state["all"]), "depth": state["depth"]}


def dictionaries() -> Case:
    model = Dictionaries()

    def body(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        output = model(x)
        assert output["depth"] == 4
        return F.mse_loss(output["logits"], y) + output["sum"].square().mean(), output["logits"], output["sum"]

    return Case(model, [*model.parts, model.head], _normal((6,), (4,)), body)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config)

    def body(model: nn.Module, ids: torch.Tensor) -> tuple[Any, ...]:
        output = model(input_ids=ids, labels=ids)
        return output["loss"], output.logits

    pieces = [model.transformer.wte, model.transformer.wpe, *model.transformer.h, model.transformer.ln_f, model.lm_head]
    # The output layer and the embedding share one parameter.
    return Case(model, pieces, _ids(1, 8), body, together=(0, len(pieces) - 1))


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)

    def body(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[Any, ...]:
        output = model(input_ids=ids, labels=labels)
        return output.loss, output.logits

    pieces = [
        model.shared, *model.encoder.block, model.encoder.final_layer_norm, *model.decoder.block,
        model.decoder.final_layer_norm, model.lm_head,
    ]  # fmt: skip
    return Case(model, pieces, _ids(2, 6), body, together=(0, len(pieces) - 1))


class Twice(nn.Module):
    """One module is called three times, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.between, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.alias = self.shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.first(x)))
        x = self.alias(torch.tanh(self.between(x)))
        return self.head(x + self.shared(x))[:, :4]


def twice() -> Case:
    model = Twice()
    return Case(model, [model.first, model.shared, model.between, model.head], _normal((8,), (4,)), _regression)


def dropout() -> Case:
    """Random numbers are drawn on the last partition only, so that they are those of one process."""
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.Linear(8, 8),
        nn.Linear(8, 8),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.2)),
    )
    return Case(model, list(model), _normal((8,), (4,)), _regression)


def batch_norm() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 4),
    )  # fmt: skip
    return Case(model, list(model), _normal((1, 8, 8), (4,)), _regression)


class InPlace(nn.Module):
    """Modifies in place: module inputs, values that other modules have used, and a constant."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(1.5).add_(1)
            return self.linear(x.clone())

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x.clone())
        before = self.parts[1](x)
        # `parts[1]` has modified `x` in place.
        after = self.parts[2](x)
        total = torch.zeros(1, device=x.device)
        total += before.sum()
        after[:, 0] = 2.0
        before.relu_()
        return self.head(self.parts[3](before + after)) * torch.sigmoid(total)


def in_place() -> Case:
    model = InPlace()
    return Case(model, [*model.parts, model.head], _normal((8,), (4,)), _regression)


class Checkpointed(nn.Module):
    """Activation checkpointing within submodules and around them; also a scripted module."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def _body(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self._body, x, use_reentrant=False)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return self.head(self.scripted(x))


def checkpointed() -> Case:
    model = Checkpointed()
    return Case(model, [*model.parts, model.scripted, model.head], _normal((8,), (4,)), _regression)


class Asking(nn.Module):
    """Control flow depends on values of tensors, in the root module and in a submodule."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y * 2 if y.sum().item() > 0 else torch.tanh(y)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        x = self.parts[1](x) if x.mean() > 0 else self.parts[2](x)
        if float(x.std()) > 0.5:
            x = x / 2
        return self.head(x)


def asking() -> Case:
    model = Asking()

    def body(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
        output = model(x)
        loss = F.mse_loss(output, y)
        return loss, output, loss.item()

    return Case(model, [*model.parts, model.head], _normal((8,), (4,)), body)


MODELS: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        mlp, sequential, resnet18, nested, skip, tied, two_by_two, dictionaries, gpt2, t5, twice, dropout, batch_norm,
        in_place, checkpointed, asking,
    )
}  # fmt: skip
