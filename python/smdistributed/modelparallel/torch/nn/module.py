"""The base class of modules whose parameters are divided over the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from smdistributed.modelparallel.exceptions import SMPValidationError
from smdistributed.modelparallel.torch.nn import collectives, layout
from smdistributed.modelparallel.torch.nn.shard import Shard

Initializer = Callable[[torch.Tensor], object]


class NotDivisibleError(SMPValidationError):
    """A size is not a multiple of the tensor-parallel degree."""


class DistributedModule(nn.Module):
    """A module whose computation involves all ranks of its tensor-parallel group, which all call it.

    Subclasses create their parameters with :meth:`add_parameter`. Each parameter is initialized as a whole, with the
    same random numbers as in a group of one rank, and each rank keeps its slice. So the initial model does not depend
    on the degree.

    Attributes:
        is_unit: Whether the module and all its submodules must be on one partition of a pipeline.
        shards: For each divided parameter by name, how it is divided.
    """

    is_unit = True

    def __init__(self) -> None:
        super().__init__()
        self.shards: dict[str, Shard] = {}
        self._whole_shapes: dict[str, tuple[int, ...]] = {}
        self._initializers: dict[str, Initializer] = {}
        #: Names of parameters whose gradients are complete on this rank (``collectives``: the group region).
        self._group_parameters: set[str] = set()

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        initializer: Initializer,
        *,
        shard_dim: int | None = None,
        in_group: bool = True,
        padded: bool = False,
    ) -> None:
        """Create a parameter.

        Args:
            name: Its name.
            shape: The shape of the whole parameter.
            initializer: Sets the values of a whole tensor in place.
            shard_dim: The dimension that is divided; ``None`` if every rank has the whole parameter.
            in_group: Whether its gradient is complete on this rank, so that it is averaged over ``RDP_GROUP``.
            padded: Whether slices may end with padding.

        Raises:
            SMPValidationError: The dimension is not divisible by the degree.
        """
        size, local = collectives.tp_size(), list(shape)
        if shard_dim is not None:
            if not padded:
                check_divisible(shape[shard_dim], f"dimension {shard_dim} of `{name}` of {type(self).__name__}")
            self.shards[name] = Shard(shard_dim, shape[shard_dim], size)
            local[shard_dim] = self.shards[name].local_size
        if in_group:
            self._group_parameters.add(name)
        self._whole_shapes[name], self._initializers[name] = shape, initializer
        self.register_parameter(name, nn.Parameter(torch.empty(local)))
        self._initialize(name)

    def share_parameter(self, name: str, owner: DistributedModule, of_owner: str) -> None:
        """Use a parameter of another distributed module, which initializes it.

        Args:
            name: Its name in this module.
            owner: The other module.
            of_owner: Its name in the other module.
        """
        self.register_parameter(name, owner._parameters[of_owner])
        if of_owner in owner.shards:
            self.shards[name] = owner.shards[of_owner]
        self._whole_shapes[name] = owner._whole_shapes[of_owner]

    def set_initializer(self, name: str, initializer: Initializer) -> None:
        """Initialize a parameter in another way, now and when it gets memory.

        Args:
            name: Its name.
            initializer: Sets the values of a whole tensor in place.
        """
        self._initializers[name] = initializer
        self._initialize(name)

    def reset_parameters(self) -> None:
        """Initialize this module's own parameters."""
        for name in self._initializers:
            self._initialize(name)

    @torch.no_grad()
    def _initialize(self, name: str) -> None:
        parameter = self._parameters[name]
        if parameter is None or parameter.is_meta:
            # Parameters without memory are initialized when they get memory.
            return
        whole = torch.empty(self._whole_shapes[name], dtype=parameter.dtype, device=parameter.device)
        self._initializers[name](whole)
        self.load_whole(name, whole)

    @torch.no_grad()
    def load_whole(self, name: str, whole: torch.Tensor) -> None:
        """Set a parameter to its slice of a whole tensor.

        Args:
            name: Its name.
            whole: The tensor.

        Raises:
            SMPValidationError: The shape is not that of the whole parameter.
        """
        if tuple(whole.shape) != self._whole_shapes[name]:
            raise SMPValidationError(
                f"`{name}` of {type(self).__name__} has the shape {list(self._whole_shapes[name])}: "
                f"got {list(whole.shape)}"
            )
        shard = self.shards.get(name)
        part = whole if shard is None else shard.take(whole, collectives.tp_rank())
        self._parameters[name].copy_(part)  # type: ignore[union-attr]

    def reduced_over_rdp(self) -> Iterator[str]:
        """Return the names of own parameters whose gradients are averaged over ``RDP_GROUP``.

        Yields:
            Each name; gradients of others are averaged over ``DP_GROUP``.
        """
        yield from self._group_parameters


def check_divisible(value: int, what: str) -> None:
    """Require that a size is divisible by the degree.

    Args:
        value: The size.
        what: Its name in the error.

    Raises:
        SMPValidationError: It is not.
    """
    if value % collectives.tp_size():
        raise NotDivisibleError(
            f"{what} is {value}: expected a multiple of `tensor_parallel_degree` {collectives.tp_size()}"
        )


def between_products_in_group() -> bool:
    """Return whether gradients of norms and biases between products are complete on each rank.

    Returns:
        ``False`` under ``optimize: memory``, where these layers process a share of the tokens.
    """
    return not layout.has_token_shares()


def units(model: nn.Module) -> list[list[nn.Module]]:
    """Return the groups of modules that must be on one partition, because they form one unit.

    Args:
        model: The model.

    Returns:
        For each outermost unit, the modules that it contains.
    """
    found: list[list[nn.Module]] = []
    seen: set[int] = set()
    for module in model.modules():
        if id(module) in seen or not isinstance(module, DistributedModule) or not module.is_unit:
            continue
        inside = list(module.modules())
        seen.update(map(id, inside))
        found.append(inside)
    return found


def shards(model: nn.Module) -> dict[int, Shard]:
    """Return how tensor parallelism divides the parameters of a model.

    Args:
        model: The model.

    Returns:
        For each parameter of which this rank holds a slice, by id, how it is divided.
    """
    return {
        id(module._parameters[name]): shard
        for module in model.modules()
        if isinstance(module, DistributedModule)
        for name, shard in module.shards.items()
        if shard.count > 1
    }


def reduced_over_rdp(model: nn.Module) -> set[int]:
    """Return the parameters whose gradients are complete on each rank of a tensor-parallel group.

    Args:
        model: The model.

    Returns:
        Their ids; none in groups of one rank.
    """
    if collectives.tp_size() == 1:
        return set()
    return {
        id(module._parameters[name])
        for module in model.modules()
        if isinstance(module, DistributedModule)
        for name in module.reduced_over_rdp()
    }
