"""Random step bodies with small models, as program texts; ``step_runs.py`` runs them, ``parity/step_bodies.py`` is the command.

A program is a model of a few layers on drawn partitions, statements of the root's ``forward`` (a module that is spread), and
statements of the body. A statement may be wrong (a gradient through a value that was overwritten): then plain PyTorch refuses the
program, and the program does not count.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace

from support.step_layers import CLASSES, LATER_LAYERS, LAYERS, MORE_LAYERS, STATE_LAYERS
from support.step_statements import Statements

SCHEDULES = ("simple", "interleaved", "zero_bubble")
#: From this seed on, programs have statements of all kinds.
ALL_KINDS = 1_000_000
#: From this seed on, bodies also change the contents of attributes around calls.
CONTENTS = 9_000_000
#: From this seed on, there are modules with state that is no parameter, and statements that change it.
STATE = 20_000_000
#: From this seed on, there are more such modules, and some models are divided by a trace of their first call.
MORE = 50_000_000
_PARTS = ("prepare", "between", "forward", "body")
_RESULTS = ("loss", "loss, h", "{'loss': loss, 'values': [h, 3]}", "(loss.detach(), None, (h * 2, 'name'))", "None")

_HEADER = """import contextlib
import random
import types

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

"""
_FOOTER = """

if __name__ == "__main__":
    # PYTHONPATH=tests smdrun -n {partitions} THIS_FILE
    from support.step_runs import compare

    print(compare(globals()))
"""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        seed: What it was drawn with.
        partitions, schedule, dtype: What it runs with.
        layers: Class of each layer of the model, by its name.
        places: Partition of each module that is on one, by its path; ``None`` if the library divides the model.
        prepare, forward, body: Statements: before the first step, of the root's forward, of the step.
        result: What the body returns.
        between: Statements that the script runs before each step; ``step`` is its number.
    """

    seed: int
    partitions: int
    schedule: str
    dtype: str
    layers: dict[str, str]
    places: dict[str, int] | None
    prepare: list[str]
    forward: list[str]
    body: list[str]
    result: str
    between: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The program, which runs as it stands under a launcher."""
        statements = "\n".join([*self.prepare, *self.between, *self.forward, *self.body])
        used = {name: kind for name, kind in self.layers.items() if re.search(rf"\bnet\.{name}\b", statements)}
        needed = [name for name in CLASSES if name in used.values() or re.search(rf"\b{name}\b", statements)]
        places = self.places
        if places is not None:
            places = {path: place for path, place in places.items() if path.split(".")[0] in ("begin", *used)}
        loss = "loss + F.mse_loss(h, y)" if "loss = " in "\n".join(self.body) else "F.mse_loss(h, y)"
        lines = [
            *(CLASSES[name].strip("\n") + "\n\n" for name in needed),
            "class Model(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.begin = nn.Linear(4, 4)",
            *(f"        self.{name} = {kind}()" for name, kind in used.items()),
            "",
            "    def forward(self, x, keep):",
            "        net = self",
            "        h = self.begin(x)",
            *_indented(self.forward, 8),
            "        return h",
            "",
            "",
            f"SEED, PARTITIONS, SCHEDULE, DTYPE = {self.seed}, {self.partitions}, {self.schedule!r}, torch.{self.dtype}",
            f"PLACES = {places!r}",
            "",
            "",
            "def prepare(net, keep):",
            "    keep.seen, keep.count, keep.last = [], 0, None",
            *_indented(self.prepare, 4),
            "",
            "",
            "def between(net, keep, step):",
            *_indented(self.between or ["pass"], 4),
            "",
            "",
            "def body(model, keep, x, y):",
            "    net = model.module",
            "    h = model(x, keep)",
            *_indented(self.body, 4),
            f"    loss = {loss}",
            "    model.backward(loss)",
            f"    return {self.result}",
        ]
        return _HEADER + "\n".join(lines) + _FOOTER.format(partitions=self.partitions)

    def smaller(self) -> list[Program]:
        """The programs that have one thing less, or a simpler one."""
        found = []
        for part in _PARTS:
            statements = getattr(self, part)
            for place, statement in enumerate(statements):
                for fewer in ([], _unwrapped(statement)):
                    if fewer is not None:
                        found.append(replace(self, **{part: [*statements[:place], *fewer, *statements[place + 1 :]]}))
        if self.result != "loss":
            found.append(replace(self, result="loss"))
        if self.schedule != "simple":
            found.append(replace(self, schedule="simple"))
        return found


def _unwrapped(statement: str) -> list[str] | None:
    """What is inside of a statement with a block; ``None`` if there is no block."""
    head, *rest = statement.split("\n")
    if not rest or not head.startswith("with ") or not all(line.startswith("    ") for line in rest):
        return None
    return ["\n".join(line.removeprefix("    ") for line in rest)]


def _indented(statements: list[str], spaces: int) -> list[str]:
    return [" " * spaces + line for statement in statements for line in statement.split("\n")]


def draw(seed: int, partitions: int) -> Program:
    """The program of a seed."""
    choose = random.Random(seed * 10 + partitions)
    has_contents = seed >= CONTENTS
    has_state = seed >= STATE
    kinds = LAYERS | LATER_LAYERS if has_contents else LAYERS
    if has_state:
        kinds = kinds | STATE_LAYERS
    if seed >= MORE:
        kinds = kinds | MORE_LAYERS
    layers: dict[str, str] = {}
    places = {"begin": choose.randrange(partitions)}
    for name in "abcdef"[: choose.randint(2, 5)]:
        kind = layers[name] = choose.choice(list(kinds))
        for child in kinds[kind]:
            places[f"{name}.{child}" if child else name] = choose.randrange(partitions)
    is_mixed = choose.random() < 0.1
    prepare: list[str] = []
    has_all = seed >= ALL_KINDS
    forward = Statements(choose, layers, prepare, is_mixed, False, has_all, has_contents, has_state).drawn(
        choose.randint(0, 4)
    )
    body = Statements(choose, layers, prepare, is_mixed, True, has_all, has_contents, has_state).drawn(
        choose.randint(2, 8)
    )
    dtype = "float32" if is_mixed else "float64"
    schedule, result = choose.choice(SCHEDULES), choose.choice(_RESULTS)
    is_divided = seed >= MORE and choose.random() < 0.15
    given = None if is_divided else places
    return Program(seed, partitions, schedule, dtype, layers, given, prepare, forward, body, result)
