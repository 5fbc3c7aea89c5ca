"""Draws the statements of random step bodies. ``h`` is the value that the next statements continue with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

_LIMIT = 60


class Statements:
    """Draws the statements of one part of a program.

    Args:
        choose: Source of random choices.
        layers: Class of each layer, by name.
        prepare: List to which statements that run before the first step are appended.
        is_mixed: Whether to draw autocast.
        in_body: Whether the statements belong to the body of the step, not to the root's forward.
        has_all: Whether to draw from all kinds, not only from those that the first seeds draw from.
        has_contents: Whether to draw changes of the contents of attributes.
        has_state: Whether to draw statements about state: writes to tensors in attributes and to detached tensors,
            attributes that modules share or that calls set, and checkpoints that read more than their arguments.
    """

    def __init__(
        self,
        choose: random.Random,
        layers: Mapping[str, str],
        prepare: list[str],
        is_mixed: bool,
        in_body: bool,
        has_all: bool,
        has_contents: bool = False,
        has_state: bool = False,
    ) -> None:
        self._choose, self._layers, self._prepare = choose, layers, prepare
        self._kinds = _KINDS | (_LATER_KINDS if has_all else {}) | (_CONTENTS_KINDS if has_contents else {})
        self._kinds |= _STATE_KINDS if has_state else {}
        self._is_mixed, self._in_body = is_mixed, in_body
        self._found: list[str] = []
        self._count = 0
        #: Names of tensors of shape (rows, 4), and of tensors of other shapes.
        self._tensors = ["h", "h", "h", "x", *(["y"] if in_body else [])]
        self._others: list[str] = []
        self._pending: list[tuple[list[str], str]] = []

    def drawn(self, count: int) -> list[str]:
        """Draws so many statements, and further ones that add their results to ``h``."""
        while count and len(self._found) < _LIMIT:
            kind = self._choose.choices(list(self._kinds), list(self._kinds.values()))[0]
            kind(self)
            count -= 1
            for names, name in self._pending:
                names.append(name)
            self._pending.clear()
        for name in dict.fromkeys([*self._tensors, *self._others]):
            if name in ("h", "x", "y") or self._choose.random() < 0.3:
                continue
            self._add(f"h = h + {name}" if name in self._tensors else f"h = h + {name}.mean()")
        return self._found

    # Parts of statements.

    def _add(self, text: str) -> None:
        self._found.append("\n".join(self._seeded(text.split("\n"))))

    def _seeded(self, lines: list[str]) -> list[str]:
        """Sets a seed before each call of a layer that draws random numbers: other partitions draw other numbers than
        one process (`docs/guides/pipelines-torch.md`).
        """
        names = [name for name, kind in self._layers.items() if kind == "Drop"]
        found: list[str] = []
        for line in lines:
            is_call = any(f"net.{name}(" in line for name in names)
            if is_call and not (found and "manual_seed" in found[-1]):
                found.append(f"{line[: len(line) - len(line.lstrip())]}torch.manual_seed({len(self._found)})")
            found.append(line)
        return found

    def _one(self, *texts: str) -> str:
        return self._choose.choice(texts)

    def _number(self) -> str:
        return self._one("0.5", "2.0", "-1.0", "1.5", "0.0", "3.0")

    def _tensor(self) -> str:
        return self._choose.choice(self._tensors)

    def _any(self) -> str:
        return self._choose.choice([*self._tensors, *self._others])

    def _layer(self, *kinds: str) -> str | None:
        names = [name for name, kind in self._layers.items() if not kinds or kind in kinds]
        return f"net.{self._choose.choice(names)}" if names else None

    def _new(self, other: bool = False) -> str:
        self._count += 1
        name = f"{'t' if self._in_body else 'f'}{self._count}"
        # The name becomes available after the statement that assigns it.
        self._pending.append((self._others if other else self._tensors, name))
        return name

    def _target(self) -> str:
        """Name for a result of shape (rows, 4)."""
        return "h" if self._choose.random() < 0.6 else self._new()

    def _call_text(self, layer: str, argument: str) -> str:
        """A call of a layer with a result of shape (rows, 4)."""
        kind = self._layers[layer.removeprefix("net.")]
        if kind == "Masked" and self._choose.random() < 0.5:
            return f"{layer}({argument}, {self._one('x', 'torch.tanh(x)', 'h')})"
        if kind == "Pair":
            part = self._one("['left']", "['right'][0]", "['right'][1]")
            return f"{layer}({argument}){part}"
        if kind == "Own":
            part = self._one("['out']", "['mean']")
            return f"{layer}({argument}){part}"
        if kind == "Cut":
            return f"F.pad({layer}({argument}), (1, 1))"
        return f"{layer}({argument})"

    def _call_line(self) -> str:
        layer = self._layer()
        assert layer is not None
        line = f"{self._target()} = {self._call_text(layer, self._tensor())}"
        if self._layers[layer.removeprefix("net.")] == "Drop":
            return f"torch.manual_seed({self._choose.randrange(9)})\n{line}"
        return line

    # The kinds of statements.

    def call(self) -> None:
        self._add(self._call_line())

    def flip(self) -> None:
        what = self._layer() if self._choose.random() < 0.7 else "net"
        self._add(f"{what}.{self._one('train()', 'eval()', 'train(False)')}")
        self.call()

    def attribute(self) -> None:
        layer = self._layer("Scaled")
        if layer is None:
            layer = self._layer("Spread")
            if layer is not None:
                self._add(f"{layer}.gain = {self._number()}")
                self._add(f"{self._target()} = {layer}({self._tensor()})")
            return
        number = self._number()
        self._add(
            self._one(
                f"{layer}.scale = {number}",
                f"{layer}.scale *= {number}",
                f"{layer}.config.factor = {number}",
                f"{layer}.config.inner.power = {self._one('1', '2')}",
                f"{layer}.options['shift'] = {number}",
                f"{layer}.table[0] = {number}",
                f"{layer}.table.append({number})",
                f"{layer}.table.clear()",
                f"{layer}.scale = keep.count",
                f"{layer}.scale = x.abs().mean()",
                f"{layer}.scale = {self._tensor()}",
                f"{layer}.options['shift'] = {self._tensor()}.detach()",
            )
        )
        self._add(f"{self._target()} = {layer}({self._tensor()})")

    def contents(self) -> None:
        """Changes the contents of an attribute before a call, and perhaps changes them back after it."""
        layer = self._layer("Scaled", "Nested")
        if layer is None:
            return
        number = self._number()
        scaled = [
            (f"{layer}.options['shift'] = {number}", f"{layer}.options['shift'] = 0.0"),
            (f"{layer}.table.append({number})", f"{layer}.table.pop()"),
            (f"{layer}.config.factor = {number}", f"{layer}.config.factor = 1.0"),
        ]
        nested = [
            (f"{layer}.settings['levels'][0]['gain'] = {number}", f"{layer}.settings['levels'][0]['gain'] = 1.0"),
            (f"{layer}.settings['levels'][1].append({number})", f"{layer}.settings['levels'][1].pop()"),
            (f"{layer}.settings['levels'][1] = [{number}]", f"{layer}.settings['levels'][1][0] = 0.5"),
            (f"{layer}.settings['inner'].shifts[1][0] = {number}", f"{layer}.settings['inner'].shifts[1][0] = 0.25"),
            (f"{layer}.settings['names'].add('bounded')", f"{layer}.settings['names'].discard('bounded')"),
        ]
        is_nested = self._layers[layer.removeprefix("net.")] == "Nested"
        change, back = self._choose.choice(nested if is_nested else scaled)
        self._add(f"{change}\n{self._target()} = {layer}({self._tensor()})")
        if self._choose.random() < 0.7:
            self._add(back)
        if self._choose.random() < 0.5:
            self._add(f"{self._target()} = {layer}({self._tensor()})")

    def refill(self) -> None:
        """Fills one tensor with new values between calls."""
        # Not a layer with dropout: its seed would be set for the first call only.
        name, layer = self._new(), self._layer("Masked")
        other = (
            self._layer(*(kind for kind in self._layers.values() if kind != "Drop"))
            if set(self._layers.values()) - {"Drop"}
            else None
        )
        if other is None:
            return
        self._add(f"{name} = torch.zeros_like({self._one('x', 'h.detach()')})")
        call = f"{layer}(h, {name})" if layer else self._call_text(other, f"h + {name}")
        self._add(f"for i in range(2):\n    {name}.fill_(i + 0.5)\n    h = {call}")

    def write(self) -> None:
        """Modifies a tensor in place, directly or through a view."""
        to, other, number = self._any(), self._tensor(), self._number()
        name = to
        if to in self._tensors:
            to = self._one(to, to, f"{to}[:, :2]", f"{to}[0]", f"{to}.t()", f"{to}.data", f"{to}.detach()")
        self._add(
            self._one(
                f"{to}.mul_({number})",
                f"{to}.add_({number})",
                f"{to}.fill_({number})",
                f"{to}.copy_({other})",
                f"{to}.add_({other})",
                f"{to}[0] = {number}",
                f"{to}[..., 1:] = {number}",
                f"{to}[{to} > 0] = {number}",
                f"{to}.index_add_(0, torch.tensor([0, 2]), {other}[:2])",
                f"{to}.clamp_(-0.5, 0.5)",
                f"{to}.zero_()",
                f"{name} *= {number}",
                f"{name} += {other}",
                f"{to}[1:] += {other}[1:]",
                f"torch.add({other}, 1.0, out={to})",
                f"F.relu({to}, inplace=True)",
                f"F.dropout({to}, 0.0, inplace=True)",
                f"{to}.masked_fill_(x > 0, {number})",
                f"{to}.requires_grad_({self._one('True', 'False')})",
                f"{to}.resize_as_({other})",
                f"{to}.set_({other})",
                f"{to}.data = {other}",
            )
        )

    def view(self) -> None:
        of = self._tensor()
        name = self._new(other=True)
        self._add(
            self._one(
                f"{name} = {of}[:, :2]",
                f"{name} = {of}[1:]",
                f"{name} = {of}[0]",
                f"{name} = {of}.t()",
                f"{name} = {of}.view(-1)",
                f"{name} = {of}.reshape(4, 3)",
                f"{name} = {of}.unbind(0)[1]",
                f"{name}, _ = {of}.chunk(2, dim=1)",
                f"{name} = {of}.unsqueeze(0).expand(2, 3, 4)",
                f"{name} = {of}.data",
                f"{name} = {of}.detach()",
                f"{name} = {of}.narrow(1, 1, 2)",
                f"{name} = {of}.diagonal()",
                f"{name} = {of}.contiguous()",
                f"{name} = {of}.as_strided((2, 2), (4, 1))",
                f"{name} = [each for each in {of}][2]",
            )
        )
        if self._choose.random() < 0.6:
            self._add(f"{name}.{self._one('mul_(2)', 'add_(1)', 'fill_(0.5)', 'clamp_(min=0)')}")
        if self._choose.random() < 0.4:
            self.call()

    def function(self) -> None:
        """Applies a custom autograd.Function."""
        to, a = self._target(), self._tensor()
        self._add(
            self._one(
                f"{to} = Reverse.apply({a}, 0.5)",
                f"{to} = Through.apply({a})",
                f"{to} = Product.apply({a}, {self._tensor()})",
                f"{to} = Clamp.apply({a} * 1.0)",
                f"{to} = Reverse.apply({self._call_text(self._layer() or '', a)}, 2.0)",
            )
        )

    def keep(self) -> None:
        """Passes values from one microbatch to the next."""
        a, to = self._tensor(), self._target()
        self._add(
            self._one(
                f"{to} = h * 1.0 if keep.last is None else h + keep.last\nkeep.last = {a}.detach()",
                f"{to} = h * 1.0 if keep.last is None else h + keep.last\nkeep.last = {a}.detach().clone()",
                f"keep.last = {a} if keep.last is None else keep.last\n{to} = h + keep.last.detach()",
                f"keep.count += 1\n{to} = h * keep.count",
                f"keep.seen.append({a}.detach())\n{to} = h + sum(keep.seen)",
                f"keep.last = {a}.detach() if keep.last is None else keep.last.add_({a}.detach())\n{to} = h + keep.last",
                f"keep.last = {a}\n{to} = h + keep.last",
                f"net.kept = getattr(net, 'kept', 0) + 1\n{to} = h / net.kept",
            )
        )

    def auxiliary(self) -> None:
        """Reads a loss that a layer leaves in an attribute."""
        layer = self._layer("Auxiliary")
        if layer is None:
            return
        order = [f"{self._target()} = {layer}({self._tensor()})", f"h = h + {layer}.penalty"]
        if self._choose.random() < 0.3:
            order.reverse()
        if self._choose.random() < 0.3:
            order.append(f"{layer}.penalty = {self._one('torch.zeros(())', '0.0')}")
        for line in order:
            self._add(line)

    def numbers(self) -> None:
        """Draws random numbers after setting the seed."""
        seed, to = self._choose.randrange(9), self._target()
        self._add(
            self._one(
                f"torch.manual_seed({seed})\n{to} = h + torch.rand(3, 4, dtype=h.dtype)",
                f"torch.manual_seed({seed})\n{to} = h + torch.randn_like(h)",
                f"torch.manual_seed({seed})\n{to} = F.dropout(h, 0.5)",
                f"torch.manual_seed({seed})\n{to} = h[torch.randperm(3)]",
                f"with torch.random.fork_rng():\n    torch.manual_seed({seed})\n    {to} = h * torch.rand(())",
                f"random.seed({seed})\n{to} = h * random.random()",
                f"{to} = h + torch.rand(3, 4, generator=torch.Generator().manual_seed({seed}), dtype=h.dtype)",
            )
        )

    def block(self) -> None:
        """Runs a statement in a context that switches gradients on or off."""
        head = self._one(
            "with torch.no_grad():", "with torch.set_grad_enabled(False):", "with torch.enable_grad():",
            "with torch.inference_mode():", "with torch.no_grad(), torch.enable_grad():",
        )  # fmt: skip
        self._wrap(head)

    def autocast(self) -> None:
        if not self._is_mixed:
            return self.call()
        self._wrap(
            self._one("with torch.autocast('cpu', dtype=torch.bfloat16):", "with torch.autocast('cpu', enabled=False):")
        )
        self._add("h = h.float()")
        return None

    def _wrap(self, head: str) -> None:
        before = len(self._found)
        self._choose.choice(
            [Statements.call, Statements.call, Statements.write, Statements.view, Statements.attribute]
        )(self)
        inside = self._found[before:]
        del self._found[before:]
        if inside:
            self._add("\n".join([head, *("    " + line for each in inside for line in each.split("\n"))]))

    def hook(self) -> None:
        layer = self._layer()
        self._prepare.append(
            self._one(
                f"{layer}.register_forward_hook(lambda module, args, output: None)",
                f"{layer}.register_forward_hook(lambda module, args, output: output * 2 if torch.is_tensor(output) else None)",
                f"{layer}.register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))",
                f"{layer}.register_forward_hook(lambda module, args, output: keep.seen.append(args[0].detach().mean()))",
                f"{layer}.register_forward_hook(lambda module, args, output: setattr(keep, 'last', args[0]))",
                f"{layer}.register_forward_hook(lambda module, args, output: setattr(keep, 'count', keep.count + 1))",
                f"{layer}.register_full_backward_hook(lambda module, inputs, outputs: None)",
            )
        )
        self._add(f"h = {self._call_text(layer or '', 'h')}")
        self._add(
            self._one("h = h + sum(keep.seen)", "h = h if keep.last is None else h + keep.last", "h = h * keep.count")
        )

    def gradient_hook(self) -> None:
        self._add("h = h * 1.0\nif h.requires_grad:\n    h.register_hook(lambda gradient: gradient * 2)")

    def loss(self) -> None:
        """Runs a backward of its own."""
        if not self._in_body:
            return
        a = self._tensor()
        self._add(
            self._one(
                f"model.backward({a}.square().mean())\nh = h.detach() + net.begin(x)",
                f"model.backward(F.mse_loss({self._call_text(self._layer() or '', 'x')}, y))",
                f"model.backward([h.mean(), {a}.std()])\nh = net.begin(h.detach())",
                f"model.backward({a}, torch.ones_like(h))\nh = net.begin(x)",
            )
        )

    def read_values(self) -> None:
        """Reads values or properties of tensors, such as item(), shape and grad_fn."""
        a, to = self._tensor(), self._target()
        self._add(
            self._one(
                f"{to} = h * {a}.mean().item()",
                f"if {a}.sum() > 0:\n    h = h * 2",
                f"{to} = h * float({a}.detach().max())",
                f"{to} = h * {a}.shape[0] + {a}.storage_offset()",
                f"h = h if {a}.requires_grad else h * 2",
                f"h = h if {a}.is_leaf else h * 2",
                f"h = h if {a}.grad_fn is None else h * 2",
                f"h = h * {a}._version",
                f"{to} = torch.vmap(lambda row: row * 2)({a})",
                f"h = h * len({a}.tolist())",
            )
        )

    def parameter(self) -> None:
        """Uses parameters and buffers in the body itself."""
        momentum = self._layer("Momentum")
        lines = [
            "h = F.linear(h, net.begin.weight)",
            "with torch.no_grad():\n    net.begin.weight.mul_(0.9)",
            "net.begin.bias.data.add_(0.1)",
            "net.begin.weight.requires_grad_(False)\nh = net.begin(h)\nnet.begin.weight.requires_grad_(True)",
            "h = h + net.begin.weight.norm()",
            "with torch.no_grad():\n    h = h + net.begin.weight.sum()",
        ]
        if momentum is not None:
            lines += [f"{momentum}.running.mul_(0.5)", f"h = h + {momentum}.running"]
            lines += [f"{momentum}.running = h.detach().mean(0)", f"{momentum}.running.copy_(h.detach()[0])"]
        self._add(self._one(*lines))

    def arithmetic(self) -> None:
        to, a, b = self._target(), self._tensor(), self._tensor()
        self._add(
            self._one(
                f"{to} = {a} * {b}",
                f"{to} = torch.where({a} > 0, {a}, {b})",
                f"{to} = torch.cat([{a}, {b}])[1:4]",
                f"{to} = torch.stack([{a}, {b}]).sum(0)",
                f"{to} = {a}.clone()",
                f"{to} = {a}",
                f"{to} = {a}.softmax(1) + {b}.tanh()",
                f"{to} = torch.einsum('ij,ij->ij', {a}, {b})",
            )
        )

    def metric(self) -> None:
        """Collects metrics: keeps them in lists, sums them up, moves them to the host."""
        a, b, layer = self._tensor(), self._tensor(), self._layer("Counter", "Last", "Auxiliary")
        lines = [
            f"with torch.no_grad():\n    keep.seen.append(F.mse_loss({a}, {b}))\nh = h + sum(keep.seen) * 0.1",
            f"keep.seen.append(F.mse_loss({a}, {b}).item())\nh = h + sum(keep.seen) * 0.1",
            f"keep.seen.append({a}.detach().cpu())\nh = h + keep.seen[-1]",
            f"keep.count += F.mse_loss({a}, {b}).item()\nh = h * (1 + keep.count)",
            f"keep.count += ({a}.argmax(1) == {b}.argmax(1)).sum().item()\nh = h * (1 + keep.count)",
            f"with torch.no_grad():\n    error = ({a} - {b}).abs()\nh = h + error",
            f"keep.seen.extend({a}.detach().mean(1).tolist())\nh = h + sum(keep.seen) * 0.1",
            f"keep.seen = [*keep.seen[-1:], {a}.detach().clone()]\nh = h + torch.stack(keep.seen).mean(0)",
        ]
        if layer is not None:
            name = {"Counter": "calls", "Last": "last", "Auxiliary": "penalty"}[
                self._layers[layer.removeprefix("net.")]
            ]
            lines.append(f"{a}.add_(1)\nif {layer}.{name} is not None:\n    h = h + {layer}.{name}")
        self._add(self._one(*lines))

    def masked(self) -> None:
        """Masks and indices that are computed from results, and writes by index."""
        to, a, b, number = self._target(), self._tensor(), self._tensor(), self._number()
        self._add(
            self._one(
                f"{to} = torch.where({a} > {a}.mean(), {b}, {number})",
                f"{to} = {b}.masked_fill({a} < 0, {number})",
                f"{to} = {b} * ({a} > 0)",
                f"{to} = {b}.index_put((torch.tensor([0, 2]),), {a}[:2])",
                f"{b}.index_put_((torch.tensor([0, 2]),), {a}[:2].detach(), accumulate=True)\n{to} = {b} * 0.5",
                f"{to} = {b} + F.one_hot({a}.argmax(1), 4)",
                f"{to} = {b}.scatter(1, {a}.argsort(1), {a})",
                f"{to} = {b}.gather(1, {a}.argmax(1, keepdim=True)).expand(3, 4)",
                f"{b}[:, {a}.argmax() % 4] = {number}\n{to} = {b} * 0.5",
                f"{b}.masked_scatter_({a} > 0, x)\n{to} = {b} * 0.5",
                f"{to} = {b}[{a}.sum(1).argsort()]",
                f"{to} = torch.cat([{b}[{a}[:, 0] > 0], {b}])[:3]",
            )
        )

    def checkpointed(self) -> None:
        """Checkpoints a layer or function, whose forward runs again in the backward.

        The layer has no state, because one process would change it twice (`docs/guides/pipelines-torch.md`).
        """
        kinds = sorted(set(self._layers.values()) & {"Mode", "Masked", "Mlp"})
        layer = self._layer(*kinds) if kinds else None
        if layer is None:
            return
        to, a, reentrant = self._target(), self._tensor(), self._one("False", "False", "True")
        self._add(
            self._one(
                f"{to} = torch.utils.checkpoint.checkpoint({layer}, {a}, use_reentrant={reentrant})",
                f"{to} = torch.utils.checkpoint.checkpoint(lambda t: {layer}(t) * t, {a}, use_reentrant={reentrant})",
                f"{to} = torch.utils.checkpoint.checkpoint(lambda t: {layer}(torch.tanh(t)), {a}, use_reentrant={reentrant})",
                f"{to} = torch.utils.checkpoint.checkpoint(lambda t, u: torch.sin(t) * u.tanh(), {a}, h, use_reentrant={reentrant})",
            )
        )

    def tensor_attribute(self) -> None:
        """Changes a tensor in an attribute between calls, in place or by assignment."""
        layer, other = self._layer("Offset"), self._layer("Seen")
        number, a = self._number(), self._tensor()
        if layer is None:
            if other is not None:
                self._add(self._one(f"h = h + {other}.seen", f"{other}.seen.zero_()", f"{other}.seen = torch.ones(4)"))
            return
        self._add(f"{self._target()} = {layer}({self._tensor()})")
        self._add(
            self._one(
                f"{layer}.offset.add_({number})",
                f"{layer}.offset.fill_({number})",
                f"{layer}.offset[:2].mul_({number})",
                f"{layer}.offset[1:] = {number}",
                f"{layer}.offset.data.add_({number})",
                f"{layer}.offset.copy_(x.mean(0))",
                f"{layer}.offset.copy_({a}.detach().mean(0))",
                f"{layer}.offset = x.mean(0)",
                f"{layer}.offset = y[0]\ny.mul_(0.5)",
                f"{layer}.offset = {a}.detach().mean(0)",
                f"{layer}.more[0].fill_({number})",
                f"{layer}.more[0] = torch.ones(4)",
                f"keep.last = {layer}.offset.add_({number})",
                f"h = h + {layer}.offset",
            )
        )
        if self._choose.random() < 0.7:
            self._add(f"{self._target()} = {layer}({self._tensor()})")

    def set_output(self) -> None:
        """The body sets an attribute that calls of the layer set as well."""
        layer = self._layer("Last", "Auxiliary")
        if layer is None:
            return
        name = {"Last": "last", "Auxiliary": "penalty"}[self._layers[layer.removeprefix("net.")]]
        values = ["torch.zeros(3, 4)", "x", "torch.ones(3, 4)", f"{self._tensor()}.detach()"]
        values += ["None", "None"] if name == "last" else ["0.0", "torch.zeros(())"]
        if self._choose.random() < 0.7:
            self._add(f"{self._target()} = {layer}({self._tensor()})")
        self._add(f"{layer}.{name} = {self._choose.choice(values)}")
        if self._choose.random() < 0.3:
            self._add("net.kept = 1")
            self.flip()
        for _ in range(self._choose.randint(0, 2)):
            self._add(f"{self._target()} = {layer}({self._tensor()})")
        if self._choose.random() < 0.5:
            self._add(f"if {layer}.{name} is not None:\n    h = h + {layer}.{name}")

    def shared(self) -> None:
        """Lets two modules share one dictionary or tensor in their attributes."""
        names = [f"net.{name}" for name, kind in self._layers.items() if kind in ("Table", "Memo", "Offset", "Seen")]
        if not names:
            return
        one, other = self._choose.choice(names), self._choose.choice(names)
        kinds = [self._layers[each.removeprefix("net.")] for each in (one, other)]
        attributes = [{"Offset": "offset", "Seen": "seen"}.get(kind, "table") for kind in kinds]
        if kinds[0] == kinds[1] or set(kinds) == {"Offset", "Seen"}:
            self._prepare.append(f"{one}.{attributes[0]} = {other}.{attributes[1]}")
        self._add(f"{self._target()} = {one}({self._tensor()})")
        self._add(f"{self._target()} = {other}({self._tensor()})")
        if self._choose.random() < 0.2 and attributes[0] == "table" and kinds[0] == "Table":
            self._add(f"h = h * (1 + {one}.table['calls'])")

    def detached_write(self) -> None:
        """Writes to a detached tensor that shares memory with a tensor that has a graph."""
        a, b, name = self._tensor(), self._tensor(), self._new()
        self._add(f"{name} = {self._one(a, f'({a} * 1.0)', f'({a} + 1.0)')}.{self._one('detach()', 'data')}")
        part = self._one("", "", "[0]", "[:, :2]")
        write, what = self._one("add_", "add_", "mul_", "copy_"), self._one(f"{b}{part}", f"{b}.detach(){part}")
        self._add(f"{name}{part}.{write}({what})")
        self._add(
            self._one(
                f"h = h + {name}", f"h = h if {name}.requires_grad else h * 2", f"h = h if {a}.requires_grad else h * 2"
            )
        )

    def checkpoint_reads(self) -> None:
        """Checkpoints a function that reads more than its arguments."""
        layer = self._layer("Mode", "Masked", "Mlp")
        to, a, b = self._target(), self._tensor(), self._tensor()
        inner = f"{layer}(t)" if layer else "torch.tanh(t)"
        self._add(
            f"{to} = torch.utils.checkpoint.checkpoint(lambda t, u={b}: {inner} * u, {a}, use_reentrant={self._one('False', 'True')})"
        )
        if self._choose.random() < 0.4:
            self.write()


#: The kinds and their weights.
_KINDS: dict[Callable[[Statements], None], int] = {
    Statements.call: 10,
    Statements.flip: 4,
    Statements.attribute: 4,
    Statements.refill: 3,
    Statements.write: 9,
    Statements.view: 8,
    Statements.function: 4,
    Statements.keep: 4,
    Statements.auxiliary: 3,
    Statements.numbers: 3,
    Statements.block: 4,
    Statements.autocast: 3,
    Statements.hook: 3,
    Statements.gradient_hook: 1,
    Statements.loss: 2,
    Statements.read_values: 3,
    Statements.parameter: 3,
    Statements.arithmetic: 4,
}
#: Kinds that were added later. Earlier seeds do not draw them, so that their programs stay the same.
_LATER_KINDS: dict[Callable[[Statements], None], int] = {
    Statements.metric: 6,
    Statements.masked: 8,
    Statements.checkpointed: 4,
}
_CONTENTS_KINDS: dict[Callable[[Statements], None], int] = {Statements.contents: 30}
_STATE_KINDS: dict[Callable[[Statements], None], int] = {
    Statements.tensor_attribute: 15,
    Statements.set_output: 12,
    Statements.shared: 10,
    Statements.detached_write: 8,
    Statements.checkpoint_reads: 4,
}
