"""Broadcasts of parameters, optimizers and objects."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch.mpi_ops import allgather, broadcast_, broadcast_async_, rank, synchronize
from horovod.torch.sparse import no_rows
from smdistributed._common import unpickling


def broadcast_parameters(
    params: dict[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Broadcast the root's parameters to all ranks, in place.

    Args:
        params: The result of ``state_dict()`` or ``named_parameters()``, or a list of tensors.
        root_rank: Rank in the world whose values are sent.
        process_set: The ranks that take part.

    Raises:
        ValueError: ``params`` is something else.

    Examples:
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, dict):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, torch.Tensor)):
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    named = [(name, tensor) for name, tensor in named if tensor is not None]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"`{name}` is a {type(tensor).__name__}, and only tensors can be broadcast in place: leave it out, and "
                "send it with `broadcast_object`"
            )
    handles = [
        broadcast_async_(
            tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor, root_rank, name, process_set
        )
        for name, tensor in named
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every rank; it is pickled on the way.

    Args:
        obj: The object on the root; ignored on other ranks.
        root_rank: Rank in the world whose object is sent.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        The root's object.
    """
    # Not the type's name, because the other ranks may pass any object.
    name = name or "broadcast_object"
    if rank() == root_rank:
        pickled = torch.frombuffer(bytearray(unpickling.dumps(obj)), dtype=torch.uint8)
        length = torch.tensor([pickled.numel()], dtype=torch.int64, device="cpu")
        broadcast_(length, root_rank, f"{name}.sz", process_set)
    else:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        broadcast_(length, root_rank, f"{name}.sz", process_set)
        pickled = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(pickled, root_rank, f"{name}.t", process_set)
    return obj if rank() == root_rank else unpickling.loads(pickled.numpy().tobytes(), f"rank {root_rank}")


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks; they are pickled on the way.

    Args:
        obj: This rank's object.
        name: Matches the ranks' calls: the same on all ranks. By default the core gives the call a number.
        process_set: The ranks that take part.

    Returns:
        The objects in the order of ranks.
    """
    name = name or "allgather_object"
    pickled = torch.frombuffer(bytearray(unpickling.dumps(obj)), dtype=torch.uint8)
    lengths = allgather(torch.tensor([pickled.numel()], device="cpu"), f"{name}.sz", process_set)
    gathered = io.BytesIO(allgather(pickled, f"{name}.t", process_set).numpy().tobytes())
    return [
        unpickling.loads(gathered.read(length), f"rank {rank} of the process set")
        for rank, length in enumerate(lengths.tolist())
    ]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast the options and the state of the root's optimizer to all ranks.

    Parameters and their gradients are unchanged. Where the optimizer is new, parameters without a gradient get a
    gradient of zeros.

    Args:
        optimizer: The same optimizer on all ranks, or a wrapper of it.
        root_rank: Rank in the world whose state is sent.
        model: Tells by its embeddings which parameters have sparse gradients.
        process_set: The ranks that take part.

    Raises:
        ValueError: The optimizer is LBFGS, whose state is not a mapping from parameters.

    Examples:
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    own = optimizer.state_dict()
    if not own["state"]:
        _give_zero_gradients(optimizer, model)
    shapes = broadcast_object(_without_tensors(own), root_rank, "optimizer_state", process_set)
    # Ranks may have different states or none; missing entries are created.
    tensors: list[tuple[str, torch.Tensor]] = []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[Any, dict[str, Any]] = {}
    for index, entries in shapes["state"].items():
        parameter = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        state[index] = {}
        for key, value in entries.items():
            if isinstance(value, _Like):
                mine = own["state"].get(index, {}).get(key) if rank() == root_rank else None
                device = parameter.device if value.follows and parameter is not None else torch.device("cpu")
                tensor = (
                    mine.clone() if mine is not None else torch.empty(value.shape, dtype=value.dtype, device=device)
                )
                tensors.append((f"optimizer_state.{index}.{key}", tensor))
                value = tensor
            state[index][key] = value
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in tensors]
    for handle in handles:
        synchronize(handle)
    if rank() == root_rank:
        return
    groups = [
        {**theirs, "params": mine["params"]}
        for theirs, mine in zip(shapes["param_groups"], own["param_groups"], strict=True)
    ]
    # Not `load_state_dict`, which would cast the state to the type of the parameters.
    for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})
    optimizer.state.clear()
    for index, entries in state.items():
        optimizer.state[parameters[index] if isinstance(index, int) else index] = entries


def _give_zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zeros, as Horovod's broadcast of a new optimizer does.

    Gradients that exist are unchanged.
    """
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    layers = [] if model is None else [layer for layer in model.modules() if isinstance(layer, kinds)]
    sparse = {layer.weight for layer in layers if layer.sparse}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter.grad is not None:
                continue
            is_sparse = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = no_rows(parameter) if is_sparse else torch.zeros_like(parameter)


class _Like:
    """Replaces a tensor, whose values are sent separately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        # Step counts stay on the CPU, also if the parameter is on a GPU.
        self.follows = tensor.device.type != "cpu"


def _without_tensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        index: {key: _Like(value) if isinstance(value, torch.Tensor) else value for key, value in entries.items()}
        for index, entries in state_dict["state"].items()
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state_dict["param_groups"]]
    return {"state": state, "param_groups": groups}
