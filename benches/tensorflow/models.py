"""The models that the TensorFlow benches train, and PyTorch models of the same shapes."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Batch size of one process.
BATCH = {"cnn": 16, "mlp": 64, "encoder": 32}
#: Of the encoder: sequence length, features, heads and blocks.
ENCODER = (128, 768, 12, 15)


def keras_model(name: str, keras: Any) -> Any:
    """Makes a model in Keras 3 or tf_keras; both have these layers."""
    layers = keras.layers
    if name == "mlp":
        # 20 M parameters, 80 MB of gradients, in six tensors.
        return keras.Sequential(
            [
                keras.Input((784,)),
                layers.Dense(4096, activation="relu"),
                layers.Dense(4096, activation="relu"),
                layers.Dense(10),
            ]
        )
    if name == "encoder":
        # 106 M parameters, 425 MB of gradients, in 242 tensors.
        tokens, features, heads, blocks = ENCODER
        x = inputs = keras.Input((tokens, features))
        for _ in range(blocks):
            attended = layers.MultiHeadAttention(heads, features // heads)(x, x)
            x = layers.LayerNormalization()(x + attended)
            hidden = layers.Dense(4 * features, activation="relu")(x)
            x = layers.LayerNormalization()(x + layers.Dense(features)(hidden))
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    # 7.5 M parameters, 30 MB of gradients, in 20 tensors.
    stack = [keras.Input((32, 32, 3))]
    for channels, stride in CHANNELS:
        stack.append(layers.Conv2D(channels, 3, strides=stride, padding="same", activation="relu"))
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(2048, "relu"), layers.Dense(10)])


#: Channels and stride of the convolutions.
CHANNELS = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (512, 2), (512, 1), (512, 1))


def torch_model(name: str) -> Any:
    """Makes a PyTorch model of the same shapes."""
    from torch import nn

    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
    stack: list[nn.Module] = []
    channels_in = 3
    for channels, stride in CHANNELS:
        stack += [nn.Conv2d(channels_in, channels, 3, stride, 1), nn.ReLU()]
        channels_in = channels
    return nn.Sequential(
        *stack, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def batch(name: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with channels last, and labels."""
    generator = np.random.default_rng(rank)
    shape = {"mlp": (784,), "cnn": (32, 32, 3), "encoder": ENCODER[:2]}[name]
    x = generator.standard_normal((BATCH[name], *shape), dtype=np.float32)
    return x, generator.integers(0, 10, BATCH[name])
