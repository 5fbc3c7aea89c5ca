"""The classes of the programs of ``step_bodies.py``, as source text. A program contains the classes that it uses."""

from __future__ import annotations

#: Source of each class. All layers map (rows, 4) to (rows, 4) unless their statement in ``step_statements.py`` says
#: otherwise.
CLASSES = {
    "Scaled": '''
class Scaled(nn.Module):
    """Reads plain, nested and mutable attributes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0
        self.config = types.SimpleNamespace(factor=1.0, inner=types.SimpleNamespace(power=1))
        self.options = {"shift": 0.0}
        self.table = [1.0, 0.5]

    def forward(self, x):
        h = self.linear(x) ** self.config.inner.power * self.scale * self.config.factor
        return h * sum(self.table) + self.options["shift"]
''',
    "Nested": '''
class Nested(nn.Module):
    """Reads containers and objects in containers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.settings = {"levels": [{"gain": 1.0}, [0.5]], "names": {"plain"}, "inner": types.SimpleNamespace(shifts=(0.0, [0.25]))}

    def forward(self, x):
        levels = self.settings["levels"]
        h = self.linear(x) * levels[0]["gain"] + sum(levels[1]) + self.settings["inner"].shifts[1][0]
        return torch.tanh(h) if "bounded" in self.settings["names"] else h
''',
    "Mode": '''
class Mode(nn.Module):
    """Depends on the mode, without randomness."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * 2 if self.training else x - 1
''',
    "Norm": """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x)
""",
    "Momentum": '''
class Momentum(nn.Module):
    """Keeps a running mean in a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("running", torch.zeros(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.running.lerp_(x.mean(0).to(self.running.dtype), 0.25)
        return self.linear(x) - self.running
''',
    "Masked": '''
class Masked(nn.Module):
    """Takes a second tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask=None):
        h = self.linear(x)
        return h if mask is None else h * mask
''',
    "Mlp": """
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))

    def forward(self, x):
        return self.inner(x)
""",
    "Writer": '''
class Writer(nn.Module):
    """Changes its argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x.mul_(0.5)
        return self.linear(x)
''',
    "Cut": '''
class Cut(nn.Module):
    """Returns a view of its argument."""

    def forward(self, x):
        return x[:, 1:3]
''',
    "Pair": '''
class Pair(nn.Module):
    """Returns a structure."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        left, right = self.linear(x).chunk(2, dim=1)
        return {"left": left, "right": [right, x]}
''',
    "Auxiliary": '''
class Auxiliary(nn.Module):
    """Leaves a loss in an attribute, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.penalty = torch.zeros(())

    def forward(self, x):
        h = self.linear(x)
        self.penalty = h.square().mean()
        return h
''',
    "Drop": """
class Drop(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x))
""",
    "Counter": '''
class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls
''',
    "Last": '''
class Last(nn.Module):
    """Keeps what it returned."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = None

    def forward(self, x):
        h = self.linear(x)
        if self.last is not None:
            h = h + self.last * 0.1
        self.last = h.detach()
        return h
''',
    "Offset": '''
class Offset(nn.Module):
    """Reads tensors in attributes that are no buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.offset = torch.zeros(4)
        self.more = [torch.zeros(4)]

    def forward(self, x):
        return self.linear(x) + self.more[0] + self.offset
''',
    "Seen": '''
class Seen(nn.Module):
    """Writes to a tensor in an attribute that is no buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = torch.zeros(4)

    def forward(self, x):
        self.seen.mul_(0.5).add_(x.detach().mean(0).to(self.seen.dtype))
        return self.linear(x) + self.seen
''',
    "Own": '''
class Own(nn.Module):
    """Returns its own buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(3, 4))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().to(self.mean.dtype))
        return {"out": self.linear(x), "mean": self.mean}
''',
    "Table": '''
class Table(nn.Module):
    """Counts its calls in a dictionary."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = {"calls": 0}

    def forward(self, x):
        self.table["calls"] = (self.table["calls"] + 1) % 5
        return self.linear(x) * (1 + self.table["calls"] / 4)
''',
    "Memo": '''
class Memo(nn.Module):
    """Keeps a dictionary with entries that depend on shapes and, in training, with its last input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = {}

    def forward(self, x):
        if len(x) not in self.table:
            self.table[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None]
        h = self.linear(x) + self.table[len(x)]
        if self.training:
            h = h + self.table.get("last", 0.0)
            self.table["last"] = x.detach().mean()
        return h
''',
    "Noise": '''
class Noise(nn.Module):
    """Draws into a tensor in an attribute, from a seed of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noise = torch.zeros(4)

    def forward(self, x):
        torch.manual_seed(3)
        self.noise.normal_()
        return self.linear(x) + self.noise
''',
    "Lazy": '''
class Lazy(nn.Module):
    """Fills a buffer and an attribute in the first call, and counts in tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("first", None)
        self.calls = torch.zeros((), dtype=torch.long)
        self.steps = [torch.zeros(2)]

    def forward(self, x):
        if self.first is None:
            self.first = torch.ones(4, dtype=x.dtype)
        self.calls += 1
        self.steps[0][0] = self.steps[0][0] + 1
        self.first.mul_(0.5)
        return self.linear(x) * (1 + self.calls % 3) + self.steps[0][0] % 2 + self.first
''',
    "Spread": '''
class Spread(nn.Module):
    """Its two parts are where they are placed."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.gain = 1.0

    def forward(self, x):
        h = self.one(x)
        h = torch.relu(h) if self.training else torch.tanh(h)
        return self.two(h) * self.gain
''',
    "Residual": '''
class Residual(nn.Module):
    """Its two parts are where they are placed; writes in place, and through a view."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        h = self.one(x)
        f = self.two(h)
        h[:, :2].mul_(2)
        self.steps += 1
        return h + f
''',
    "Reverse": '''
class Reverse(torch.autograd.Function):
    """Reverses the gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None
''',
    "Through": '''
class Through(torch.autograd.Function):
    """Rounds, and lets the gradient through."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient
''',
    "Product": '''
class Product(torch.autograd.Function):
    """Saves tensors; its gradient is not that of the product."""

    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient * b * 2, gradient * a * 3
''',
    "Clamp": '''
class Clamp(torch.autograd.Function):
    """Changes its argument, and keeps a tensor in the context."""

    @staticmethod
    def forward(ctx, x):
        ctx.mask = x.abs() < 0.5
        ctx.mark_dirty(x)
        return x.clamp_(-0.5, 0.5)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask * 0.5
''',
}

#: The layer classes, each with the submodules that are placed individually; ``""`` is the layer itself.
LAYERS = {
    "Scaled": ("",),
    "Mode": ("",),
    "Norm": ("",),
    "Momentum": ("",),
    "Masked": ("",),
    "Mlp": ("",),
    "Writer": ("",),
    "Cut": ("",),
    "Pair": ("",),
    "Auxiliary": ("",),
    "Drop": ("",),
    "Counter": ("",),
    "Last": ("",),
    "Spread": ("one", "two"),
    "Residual": ("one", "two"),
}
#: Layers that were added later. Earlier seeds do not draw them, so that their programs stay the same.
LATER_LAYERS = {"Nested": ("",)}
#: Layers whose state is more than parameters.
STATE_LAYERS = {"Offset": ("",), "Seen": ("",), "Own": ("",), "Table": ("",), "Memo": ("",)}
#: Layers of programs with seeds from `step_bodies.MORE` on.
MORE_LAYERS = {"Noise": ("",), "Lazy": ("",)}
