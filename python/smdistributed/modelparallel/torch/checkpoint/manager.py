"""``smp.CheckpointManager``: checkpoints in safetensors shards, independent of the number of ranks.

Replicas share the work: each writes its part of the rows of every large tensor. The core writes, commits, verifies and
reads the files; see ``rust-core/src/checkpoint``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel import shares
from smdistributed.modelparallel.exceptions import CLASSES, SMPCheckpointError, SMPUsageError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.saver import Content, Saver
from smdistributed.modelparallel.torch.checkpoint import (
    json_codec,
    optimizer_state,
    sharded_tensors,
    slices,
    state_dicts,
)
from smdistributed.modelparallel.torch.communication import allgather, raise_on_all_ranks
from smdistributed.modelparallel.torch.nn.shard import Shard
from smdistributed.modelparallel.torch.sharding.piece import Piece
from smdistributed.modelparallel.torch.state import state
from smdistributed.modelparallel.torch.tracing.remote_tensor import MetaParameter

_MODEL, _OPTIMIZER, _USER, _EXTRA = "model/", "optimizer/", "user/", "extra/"
#: The name of the master weight among the tensors of a parameter's optimizer state.
_MASTER = "#master_weight"
#: Suffixes of tensors that hold Python's numbers in an optimizer's state.
_NUMBERS = {int: ("#int", torch.int64), float: ("#float", torch.float64), bool: ("#bool", torch.bool)}
_ELEMENTS = {getattr(torch, name): element for name, element in shares.ELEMENTS.items()}
_DTYPES = {name: dtype for dtype, name in _ELEMENTS.items()}
_CLASSES = {**CLASSES, "io": SMPCheckpointError, "invalid_argument": SMPCheckpointError}


class CheckpointManager:
    """Saves and loads the wrapped model and optimizer. All ranks create one, and call its methods together.

    Args:
        path: A directory on a file system that all ranks share.
        keep: Number of newest checkpoints to keep; ``None`` for all.
        asynchronous: Whether ``save`` returns when the state has been copied, and files are written in the
        background.
        durable: Whether a checkpoint is synced to the disk before it counts as complete. Otherwise it survives the
        death of every process, but not a power failure.
        threads: Number of files that this rank writes in parallel; by default its share of the cores.
        timeout_seconds: How long a rank waits for others.

    Example:
        with smp.CheckpointManager("checkpoints", keep=3) as manager:
            content = manager.load() if manager.latest() is not None else {}
            for step in range(content.get("step", 0), steps):
                ...
                manager.save(step + 1, {"step": step + 1})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        asynchronous: bool = True,
        durable: bool = True,
        threads: int | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        groups = state.groups
        self.path, self.asynchronous = os.fspath(path), asynchronous
        cores = len(os.sched_getaffinity(0)) // _core.local_size()
        self.threads = threads or max(1, min(8, cores))
        # Buffers for copies from devices, which the next save reuses.
        self._pinned: dict[str, torch.Tensor] = {}
        self._saver = Saver(
            self.path,
            groups.rank,
            groups.topology.size,
            lambda value: allgather(value, CommGroup.WORLD),
            self.threads,
            durable,
            keep,
            timeout_seconds,
        )

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure, other ranks may never call the method.
        if kind is None:
            self.wait()

    def save(self, step: int, user_content: Any = None, *, tag: str | None = None) -> None:
        """Save model and optimizer, and rank 0's ``user_content``.

        Args:
            step: The number of the training step, which orders checkpoints.
            user_content: Numbers, strings, bytes, tensors, and lists, tuples, sets and dicts of them.
            tag: The checkpoint's name; by default derived from the step.

        Raises:
            SMPCheckpointError: This save or the previous one failed, here or on another rank, or the path is in use
            by something that is not a checkpoint of this format; raised on all ranks.
        """
        model = _model()
        if not model.is_partitioned:
            raise SMPUsageError(
                "the model is partitioned in the first call of a `smp.step` function; there is nothing to save before"
            )
        name = f"step-{step}" if tag is None else tag
        self._saver.save(
            name,
            step,
            lambda: self._prepared(model, user_content),
            lambda prepared: self._saved(model, *prepared),
            self.asynchronous,
        )

    def _prepared(self, model: Any, user_content: Any) -> tuple[Any, ...]:
        """Return what this rank saves without communication: its tensors, their copies and blocks, and the text."""
        local = _LocalTensors.of(model, state.optimizer)
        tensors = local.whole
        text = "null"
        if state.groups.rank == 0:
            text = self._content(user_content, tensors)
        if state.groups.rank_in("rdp") == 0:
            tensors |= _extras(model)
        divided = _divided(model, tensors)
        if state.groups.rank_in("tp") > 0:
            # The first rank of a tensor-parallel group writes the tensors that all its ranks have.
            tensors = {name: tensor for name, tensor in tensors.items() if name in divided}
        parts = {name: _without_padding(tensor, divided.get(name)) for name, tensor in tensors.items()}
        copies, owned = self._on_host({name: part for name, part in parts.items() if part is not None})
        blocks = [_block(name, tensor, name in owned, divided.get(name)) for name, tensor in copies.items()]
        return local, copies, blocks, text

    def _saved(self, model: Any, local: _LocalTensors, copies: dict[str, Any], blocks: list[Any], text: str) -> Content:
        """Return the content that this rank saves; all ranks call it."""
        if local.held:
            rows = sharded_tensors.rows(local.shards, local.held, local.divided)
            rows |= {name: sharded_tensors.Rows(each, [], []) for name, each in local.numbers.items()}
            blocks += [_rows_block(name, each) for name, each in rows.items()]
            copies |= {name: each.tensor for name, each in rows.items()}
        slices = shares.shard_slices(blocks, state.groups.rank_in("rdp"), len(state.groups.members["rdp"]))
        layout = {
            "pp": len(state.groups.members["pp"]),
            "tp": len(state.groups.members["tp"]),
            "rdp": len(state.groups.members["rdp"]),
            "assignment": {path: model.partition_of(path) for path, _ in model.module.named_modules()},
            "aliases": {_MODEL + alias: _MODEL + name for alias, name in _aliases(model).items()},
        }
        return Content(slices, json.dumps(layout), text, copies)

    def wait(self) -> None:
        """Wait for the running save; all ranks call it.

        Raises:
            SMPCheckpointError: The checkpoint could not be written, here or on another rank; raised on all ranks.
        """
        self._saver.wait()

    def latest(self) -> str | None:
        """Return the name of the newest complete checkpoint, if there is one; all ranks call it.

        Raises:
            SMPCheckpointError: The directory cannot be read; raised on all ranks.
        """
        self.wait()

        def find_newest() -> str | None:
            with errors.translated(_CLASSES):
                return _core.checkpoint_newest(self.path)

        what = f"the checkpoints in `{self.path}` could not be listed"
        return raise_on_all_ranks(find_newest, CommGroup.WORLD, what, lambda newest: newest)

    def load(
        self,
        tag: str | None = None,
        *,
        strict: bool = True,
        load_optimizer: bool = True,
        load_sharded_optimizer_state: bool = True,
    ) -> Any:
        """Load model and optimizer; each rank reads the tensors that it holds.

        Before the model is partitioned, the load waits for the partition. The saved partition is used if there are as
        many partitions now.

        Args:
            tag: The checkpoint; by default the newest.
            strict: Whether the checkpoint must contain every parameter.
            load_optimizer: Whether the optimizer is loaded.
            load_sharded_optimizer_state: With sharded data parallelism, ``False`` loads only master weights and loss
                scale of the optimizer.

        Returns:
            The user content.

        Raises:
            SMPCheckpointError: There is no checkpoint, it does not fit the model, or a file is missing or damaged;
            raised on all ranks.
        """
        self.wait()
        model = _model()
        what = f"the checkpoint {'' if tag is None else f'{tag!r} '}in `{self.path}` could not be loaded"

        def open_checkpoint() -> tuple[Any, Any, dict[str, tuple[str, list[int]]], Any]:
            with errors.translated(_CLASSES):
                reader = _core.CheckpointReader(self.path, tag)
                if reader.kind != "sharded":
                    raise SMPCheckpointError(
                        f"checkpoint `{reader.tag}` is a {reader.kind} one: `smp.resume_from_checkpoint` loads it"
                    )
                layout = json.loads(reader.layout)
                found = {name: (dtype, shape) for name, dtype, shape in reader.tensors()}
            user = json.dumps(json.loads(reader.content)["user"])
            return reader, layout, found, json_codec.decode(user, lambda name: self._read(reader, found, [name])[name])

        reader, layout, found, user = raise_on_all_ranks(
            open_checkpoint, CommGroup.WORLD, what, lambda seen: (seen[0].tag, seen[0].step)
        )
        if not model.is_partitioned and layout.get("pp") == len(state.groups.members["pp"]):
            model._set_assignment(layout["assignment"])
        aliases = layout.get("aliases", {})
        optimizer = state.optimizer if load_optimizer else None

        def load() -> None:
            precision_only = not load_sharded_optimizer_state and model.sharded is not None
            self._load(reader, found, aliases, model, optimizer, strict, precision_only)

        def load_on_all_ranks() -> None:
            raise_on_all_ranks(load, CommGroup.WORLD, what)
            if optimizer is not None:
                optimizer._publish()

        model._when_partitioned(load_on_all_ranks)
        return user

    def _load(
        self,
        reader: Any,
        found: Mapping[str, tuple[str, list[int]]],
        aliases: Mapping[str, str],
        model: Any,
        optimizer: Any,
        strict: bool,
        precision_only: bool,
    ) -> None:
        entries = state_dicts.model_entries(model)
        local = {name: tensor for name, tensor in entries.items() if not isinstance(tensor, MetaParameter)}
        stored = {name: aliases.get(_MODEL + name, _MODEL + name) for name in entries}
        # Checks the names of all partitions, so that all ranks get the same result.
        extras = state_dicts.extra_entries(model)
        missing = sorted(name for name in entries if stored[name] not in found)
        missing += sorted(name for name in extras if _EXTRA + name not in found)
        known = set(stored.values())
        extra = sorted(name.removeprefix(_MODEL) for name in found if name.startswith(_MODEL) and name not in known)
        if strict and (missing or extra):
            raise SMPCheckpointError(
                f"checkpoint `{reader.tag}` does not fit the model: missing {state_dicts._some(missing)}; not in the "
                f"model {state_dicts._some(extra)}"
            )
        pieces = {} if model.sharded is None else model.sharded.pieces
        present = {stored[name]: tensor for name, tensor in local.items() if stored[name] in found}
        targets = {name: tensor for name, tensor in present.items() if id(tensor) not in pieces}
        self._read(reader, found, targets, targets, _divided(model, targets))
        shards = {name: (tensor, pieces[id(tensor)]) for name, tensor in present.items() if id(tensor) in pieces}
        self._read_shards(reader, found, shards, model)
        if state.optimizer is not None:
            state.optimizer._parameters_changed()
        for name, module in state_dicts.local_extras(model).items():
            if _EXTRA + name in found:
                text = bytes(self._read(reader, found, [_EXTRA + name])[_EXTRA + name].tolist()).decode()
                module.set_extra_state(json_codec.decode(text, lambda inner: self._read(reader, found, [inner])[inner]))
        if optimizer is not None:
            self._load_optimizer(reader, found, model, optimizer, precision_only)

    def _load_optimizer(
        self,
        reader: Any,
        found: Mapping[str, tuple[str, list[int]]],
        model: Any,
        optimizer: Any,
        precision_only: bool,
    ) -> None:
        groups = json.loads(reader.content).get("groups")
        if groups is None:
            return
        local = optimizer_state.local_optimizer(model, optimizer)
        if len(groups) != len(local["param_groups"]):
            raise SMPCheckpointError(
                f"checkpoint `{reader.tag}` has {len(groups)} groups of parameters, and the optimizer "
                f"{len(local['param_groups'])}"
            )
        mine = {name for group in local["param_groups"] for name in group["params"]}
        wanted = {}
        for name in found:
            if name.startswith(_OPTIMIZER):
                parameter, _, key = name.removeprefix(_OPTIMIZER).rpartition("/")
                if parameter in mine and (key == _MASTER or not precision_only):
                    wanted[name] = (parameter, key)
        pieces = {
            name: Piece(name, start, end, tuple(shape), True)
            for name, (start, end, shape) in local.get(optimizer_state.SHARDS, {}).items()
        }
        # Compared by name, not by shape: the step count is a single number, and a parameter may have one element,
        # too.
        sharded = {
            name: parameter
            for name, (parameter, key) in wanted.items()
            if parameter in pieces
            and found[name][1] == found.get(_MODEL + parameter, ("", None))[1]
            and (found[name][1] or key != "step")
        }
        shapes = {name: torch.empty(found[name][1], device="meta") for name in wanted if name not in sharded}
        divided = _divided(model, shapes, are_whole=True)
        entries: dict[str, dict[str, Any]] = {}
        masters: dict[str, torch.Tensor] = {}
        read = self._read(reader, found, shapes, divided=divided)
        for name, parameter in sharded.items():
            piece = pieces[parameter]
            read[name] = torch.empty(piece.end - piece.start, dtype=_DTYPES[found[name][0]], device="cpu")
        self._read_shards(
            reader, found, {name: (read[name], pieces[parameter]) for name, parameter in sharded.items()}, model
        )
        for name, tensor in read.items():
            parameter, key = wanted[name]
            plain, mark, _ = key.partition("#")
            if key == _MASTER:
                masters[parameter] = tensor
            else:
                entries.setdefault(parameter, {})[plain] = tensor.item() if mark else tensor
        hyper = json_codec.decode(json.dumps(groups), _no_tensors)
        both = [{**theirs, "params": ours["params"]} for theirs, ours in zip(hyper, local["param_groups"], strict=True)]
        whole: dict[str, Any] = {"state": entries, "param_groups": both}
        scale = json.loads(reader.content).get("loss_scale")
        if scale is not None:
            whole |= {optimizer_state.MASTER_WEIGHTS: masters, optimizer_state.LOSS_SCALE: scale}
        if optimizer_state.SHARDS in local:
            whole[optimizer_state.SHARDS] = local[optimizer_state.SHARDS]
        optimizer_state.load_own_part(model, optimizer, whole, precision_only)

    def _read_shards(
        self,
        reader: Any,
        found: Mapping[str, tuple[str, list[int]]],
        wanted: Mapping[str, tuple[torch.Tensor, Piece]],
        model: Any,
    ) -> None:
        """Read the elements of shards."""
        about = {name: (_DTYPES[found[name][0]], found[name][1]) for name in wanted}
        sharded_tensors.read(reader, about, wanted, slices.named_shards(model.module), self.threads)

    @torch.no_grad()
    def _read(
        self,
        reader: Any,
        found: Mapping[str, tuple[str, list[int]]],
        names: Iterable[str],
        into: Mapping[str, torch.Tensor] | None = None,
        divided: Mapping[str, Shard] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read tensors in place where possible, otherwise into new ones."""
        tensors, copies, targets = {}, {}, []
        results: dict[str, torch.Tensor] = {}
        for name in names:
            if name not in found:
                raise SMPCheckpointError(f"checkpoint `{reader.tag}` has no tensor `{name}`")
            dtype, shape = _DTYPES[found[name][0]], found[name][1]
            start, shard = [0] * len(shape), (divided or {}).get(name)
            if shard is not None:
                start[shard.dim], end = shard.bounds(state.groups.rank_in("tp"))
                local = shard.local_shape(shape)
                # Padding is filled with zeros.
                whole = into[name] if into is not None else torch.zeros(local, dtype=dtype, device="cpu")
                expected = shard.whole_shape(whole.shape)
                tensor = whole.narrow(shard.dim, 0, end - start[shard.dim])
                results[name] = whole
            else:
                tensor = into[name] if into is not None else torch.empty(shape, dtype=dtype, device="cpu")
                expected = tuple(tensor.shape)
            if tuple(shape) != expected:
                raise SMPCheckpointError(
                    f"`{name}` has the shape {shape} in checkpoint `{reader.tag}`, and {list(expected)} in the model"
                )
            tensors[name] = tensor
            if not tensor.numel() and shard is not None:
                continue
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype != dtype:
                copies[name] = tensor
                tensor = torch.empty(tensor.shape, dtype=dtype, device="cpu")
                tensors[name] = tensor
            lengths, size = list(tensor.shape), tensor.numel() * tensor.element_size()
            targets.append((name, start, lengths, tensor.data_ptr(), size))
        with errors.translated(_CLASSES):
            reader.read(targets, self.threads)
        for name, target in copies.items():
            target.copy_(tensors[name])
            tensors[name] = target
        return {**tensors, **results}

    def _content(self, user_content: Any, tensors: dict[str, torch.Tensor]) -> str:
        def keep(tensor: torch.Tensor) -> str:
            name = f"{_USER}{sum(name.startswith(_USER) for name in tensors)}"
            tensors[name] = tensor.detach()
            return name

        user = json.loads(json_codec.encode(user_content, keep))
        groups = None
        if state.optimizer is not None:
            hyper = [
                {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for group in state.optimizer.optimizer.param_groups
            ]
            groups = json.loads(json_codec.encode(hyper, _no_tensors_kept))
        masters = None if state.optimizer is None else state.optimizer._masters
        scale = None if masters is None else masters.scale_state()
        return json.dumps({"user": user, "groups": groups, "loss_scale": scale})

    def _on_host(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Return dense tensors in host memory, and the names of those that are copies.

        Tensors that are on a device or not dense are copied here. The core copies only tensors that training may
        change, so it does not copy them again. Host memory thus holds one copy of each tensor during the write.
        """
        copies, owned, waits = {}, set(), False
        for name, tensor in tensors.items():
            if tensor.dtype not in _ELEMENTS:
                raise SMPCheckpointError(f"`{name}` is of {tensor.dtype}, which a checkpoint cannot store")
            if tensor.device.type == "cpu":
                copies[name] = tensor.contiguous()
                if copies[name] is not tensor and copies[name].data_ptr() != tensor.data_ptr():
                    owned.add(name)
                continue
            kept = self._pinned.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            kept.copy_(tensor, non_blocking=True)
            copies[name], waits = kept, True
            owned.add(name)
        if waits:
            torch.cuda.synchronize()
        return copies, owned


def _model() -> Any:
    if state.model is None:
        raise SMPUsageError("there is no `smp.DistributedModel` whose state could be saved or loaded")
    return state.model


def _aliases(model: Any) -> dict[str, str]:
    """Return the further names of shared tensors, with the first one."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in state_dicts.model_entries(model).items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return aliases


class _LocalTensors(NamedTuple):
    """The tensors that this rank holds, by their names in a checkpoint, in an order that is equal on all replicas.

    Attributes:
        whole: Tensors that all replicas hold completely.
        shards: Tensors of which this rank holds some elements, and other ranks the rest.
        numbers: Single numbers of sharded optimizer states, such as step counts, that this rank writes.
        held: The result of ``sharded_tensors.holders``.
        divided: The result of ``slices.named_shards``.
    """

    whole: dict[str, torch.Tensor]
    shards: dict[str, tuple[torch.Tensor, Piece]]
    numbers: dict[str, torch.Tensor]
    held: dict[str, sharded_tensors.Holders]
    divided: dict[str, Shard]

    @classmethod
    def of(cls, model: Any, optimizer: Any) -> _LocalTensors:
        """Return the tensors of the model and of the optimizer, if there is one."""
        divided = slices.named_shards(model.module)
        held = sharded_tensors.holders(model, optimizer, divided)
        found, aliases = cls({}, {}, {}, held, divided), _aliases(model)
        pieces = {} if model.sharded is None else model.sharded.pieces
        for name, tensor in state_dicts.model_entries(model).items():
            if isinstance(tensor, MetaParameter) or name in aliases:
                continue
            if id(tensor) in pieces:
                found.shards[_MODEL + name] = tensor.detach(), pieces[id(tensor)]
            else:
                found.whole[_MODEL + name] = tensor.detach()
        if optimizer is not None:
            found._add_states(optimizer_state.local_optimizer(model, optimizer))
        return found

    def _add_states(self, local: Mapping[str, Any]) -> None:
        entries = {
            parameter: {_MASTER: master} for parameter, master in local.get(optimizer_state.MASTER_WEIGHTS, {}).items()
        }
        for parameter, entry in local["state"].items():
            entries[parameter] = entries.get(parameter, {}) | entry
        for parameter, entry in entries.items():
            for key, value in entry.items():
                each = _numbered(f"{_OPTIMIZER}{parameter}/{key}", key, value, parameter)
                if each is not None:
                    self._add_state(parameter, *each, local.get(optimizer_state.SHARDS, {}).get(parameter))

    def _add_state(self, parameter: str, name: str, tensor: torch.Tensor, shard: Any) -> None:
        if shard is None:
            self.whole[name] = tensor
            return
        start, end, shape = shard
        if tensor.shape == (end - start,):
            self.shards[name] = tensor, Piece(parameter, start, end, tuple(shape), True)
        elif start == 0 and end > 0 and self.held[parameter].writes and self._counts(parameter):
            self.numbers[name] = tensor.cpu()

    def _counts(self, parameter: str) -> bool:
        """Whether this rank writes the single numbers of a parameter's state; the first tensor-parallel rank does."""
        return parameter not in self.divided or state.groups.rank_in("tp") == 0


def _numbered(name: str, key: str, value: Any, parameter: str) -> tuple[str, torch.Tensor] | None:
    """Return a tensor or a number of an optimizer's state as a tensor, with its name in the checkpoint."""
    if isinstance(value, torch.Tensor):
        return name, value.detach()
    if type(value) in _NUMBERS:
        ending, dtype = _NUMBERS[type(value)]
        return name + ending, torch.tensor(value, dtype=dtype, device="cpu")
    if value is not None:
        raise SMPCheckpointError(
            f"the optimizer's `{key}` of `{parameter}` is a {type(value).__name__}: expected tensors and numbers"
        )
    return None


def _extras(model: Any) -> dict[str, torch.Tensor]:
    """Return the extra state of this rank's modules: for each, a JSON text as bytes, and the tensors in it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, module in state_dicts.local_extras(model).items():

        def keep(tensor: torch.Tensor, name: str = name) -> str:
            inner = f"{_EXTRA}{name}/{len(tensors)}"
            tensors[inner] = tensor.detach()
            return inner

        text = json_codec.encode(module.get_extra_state(), keep, name)
        tensors[_EXTRA + name] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def _divided(model: Any, tensors: Mapping[str, torch.Tensor], are_whole: bool = False) -> dict[str, Shard]:
    """Return how tensors of the model and of the optimizer are divided over the tensor-parallel group.

    Args:
        model: The model.
        tensors: The tensors, by name in the checkpoint.
        are_whole: Whether they have the shapes of whole tensors.
    """
    shards = slices.named_shards(model.module)
    shapes = slices.local_shapes(model.module, shards)
    found = {}
    for name, tensor in tensors.items():
        parameter = name.removeprefix(_MODEL)
        if name.startswith(_OPTIMIZER):
            parameter = name.removeprefix(_OPTIMIZER).rpartition("/")[0]
        shard = shards.get(parameter)
        if shard is None or parameter not in shapes:
            continue
        shape = shard.whole_shape(shapes[parameter]) if are_whole else shapes[parameter]
        if slices.is_like(tensor, shape, name):
            found[name] = shard
    return found


def _without_padding(tensor: torch.Tensor, shard: Shard | None) -> torch.Tensor | None:
    """Return the part of a tensor to write; ``None`` for a slice that is padding."""
    if shard is None:
        return tensor
    begin, end = shard.bounds(state.groups.rank_in("tp"))
    return tensor.narrow(shard.dim, 0, end - begin) if end > begin else None


def _block(name: str, tensor: torch.Tensor, is_owned: bool, shard: Shard | None) -> shares.Block:
    # Only the first rank has user content, and the extra state of modules may differ in size between replicas.
    is_shared = not name.startswith((_USER, _EXTRA))
    shape, element = list(tensor.shape), _ELEMENTS[tensor.dtype]
    origin = whole = None
    if shard is not None:
        origin = [0] * len(shape)
        origin[shard.dim] = shard.bounds(state.groups.rank_in("tp"))[0]
        whole = list(shard.whole_shape(shape))
    address, size = tensor.data_ptr(), tensor.element_size()
    return shares.Block(name, element, shape, size, address, is_shared, is_owned, origin, whole)


def _rows_block(name: str, rows: sharded_tensors.Rows) -> shares.Block:
    """Return the part of a sharded tensor that only this rank writes, as a block."""
    tensor = rows.tensor
    element, address, size = _ELEMENTS[tensor.dtype], tensor.data_ptr(), tensor.element_size()
    return shares.Block(name, element, list(tensor.shape), size, address, False, True, rows.origin, rows.shape)


def _no_tensors(name: str) -> torch.Tensor:
    raise SMPCheckpointError(f"the optimizer's groups name a tensor, `{name}`")


def _no_tensors_kept(tensor: torch.Tensor) -> str:
    raise SMPCheckpointError("the optimizer's groups hold a tensor: expected numbers, as of the learning rate")
