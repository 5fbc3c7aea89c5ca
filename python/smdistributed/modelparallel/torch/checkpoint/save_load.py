"""``smp.save``, ``smp.load``, ``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``.

They write the documented files, which plain ``torch.load`` reads without executing code, or the sharded format of
:class:`CheckpointManager`. All ranks write into a hidden staging folder of the core (``rust-core/src/checkpoint``),
which is renamed when it is complete. So a named checkpoint is complete, and only checkpoints of this library are
replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from smdistributed import _core
from smdistributed._common import errors
from smdistributed.modelparallel import shares
from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.exceptions import CLASSES, SMPCheckpointError, SMPValidationError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch.checkpoint import hugging_face, optimizer_state, slices, state_dicts, torch_files
from smdistributed.modelparallel.torch.checkpoint.manager import CheckpointManager
from smdistributed.modelparallel.torch.communication import allgather, raise_on_all_ranks
from smdistributed.modelparallel.torch.state import state

_NEWEST = "newest"
_PARTIAL = "_partial"
#: How long a rank waits for the folder of rank 0, which exists before the other ranks look for it.
_FOLDER_SECONDS = 60.0
_CLASSES = {**CLASSES, "io": SMPCheckpointError, "invalid_argument": SMPCheckpointError}


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
    pickel_module: Any = None,
) -> None:
    """Save an object as ``torch.save``, to a file of this rank or, with ``partial=False``, to ``f`` itself.

    Args:
        obj: The object to save.
        f: The path; the name of a partial file also contains the rank.
        partial: Whether each rank writes a file of its own.
        pickle_module: As in ``torch.save``.
        pickle_protocol: As in ``torch.save``.
        v3: Whether the name also contains the replica, for sharded states.
        pickel_module: The original's spelling of ``pickle_module``.
    """
    if not isinstance(f, str):
        raise SMPValidationError(f"the file is a {type(f).__name__}: expected a path as str")
    path = Path(_own_file(f, v3) if partial else f)
    torch_files.put(obj, path, pickle_module=pickel_module or pickle_module, pickle_protocol=pickle_protocol)


def load(
    f: str,
    map_location: Any = None,
    pickle_module: Any = pickle,
    partial: bool = True,
    back_compat: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Load a file that ``smp.save`` has written, as ``torch.load`` does.

    No code from the file is executed, unless ``weights_only=False`` is given.

    Args:
        f: The file's name.
        map_location: As for ``torch.load``.
        pickle_module: Used with ``weights_only=False``.
        partial: Whether to load this rank's file instead of ``f`` itself.
        back_compat: Whether a file with a name of earlier versions is loaded if there is none with the current name.
        **pickle_load_args: Passed to ``torch.load``.

    Returns:
        The object.

    Raises:
        SMPCheckpointError: The file is missing, or contains objects whose loading would execute code.
    """
    if pickle_load_args.get("weights_only") is False:
        pickle_load_args["pickle_module"] = pickle_module
    if not partial:
        return torch_files.get(Path(f), map_location, **pickle_load_args)
    # Files of sharded states have names of their own.
    names = [_own_file(f, False), _own_file(f, True)]
    if back_compat:
        names[1:1] = [f"{f}_{_rank_info(False)}", f"{f}_{_rank('mp')}"]
    for name in dict.fromkeys(names):
        if Path(name).exists():
            return torch_files.get(Path(name), map_location, **pickle_load_args)
    raise SMPCheckpointError(f"`{names[0]}` is missing: rank {state.groups.rank} has no file of its own")


def save_checkpoint(
    path: str | os.PathLike[str],
    tag: str,
    partial: bool = True,
    model: Any = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
    format: str = "torch",
) -> None:
    """Save a checkpoint; all ranks call it.

    Args:
        path: A directory on a file system that all ranks share; created if necessary.
        tag: The name: a partial checkpoint is ``path/{tag}_partial``, a full one ``path/{tag}``.
        partial: Whether each rank writes a file, or one file has the whole model, without the optimizer.
        model: The wrapped model; without it, none is saved. The sharded format always saves that of this process.
        optimizer: The wrapped optimizer; as for ``model``.
        user_content: Any object that can be pickled. A warning names classes that :func:`resume_from_checkpoint`
        reads only with the caller's permission; the sharded format rejects them.
        translate_if_full: Whether a full checkpoint uses Hugging Face's names if tensor parallelism has replaced
        modules of Hugging Face.
        num_kept_partial_checkpoints: Number of partial checkpoints to keep; the oldest ones are removed.
        format: ``"torch"``, or ``"sharded"`` for that of :class:`CheckpointManager`, at ``path/{tag}``.

    Raises:
        SMPCheckpointError: The checkpoint could not be written, here or on another rank; ``tag`` is not a valid name;
        or the path is in use by something that is not a checkpoint of the same kind, which then stays unchanged.
        Raised on all ranks.
    """
    if format not in ("torch", "sharded"):
        raise SMPValidationError(f"`format` is {format!r}: expected 'torch' or 'sharded'")
    root = Path(path)
    if not partial and format == "torch" and num_kept_partial_checkpoints is not None:
        warn_once("`num_kept_partial_checkpoints` is ignored with `partial=False`: full checkpoints are not removed")
    if format == "torch" and model is None and optimizer is None:
        warn_once(f"the checkpoint {tag!r} contains neither a model nor an optimizer: pass `model` and `optimizer`")
    if not partial and format == "torch" and optimizer is not None:
        warn_once("`optimizer` is ignored with `partial=False`: full checkpoints do not contain it")
    if format == "sharded":
        if not partial or not translate_if_full:
            warn_once(
                "`partial=False` and `translate_if_full=False` are ignored with `format='sharded'`: the files have the "
                "whole model by its own names, in shards"
            )
        manager = CheckpointManager(root, keep=num_kept_partial_checkpoints, asynchronous=False)
        # Checkpoints of the core are ordered by step; these have only names.
        manager.save(_next_step(root), user_content, tag=tag)
        return
    if partial:
        _save_partial(root, tag, model, optimizer, user_content, num_kept_partial_checkpoints)
    else:
        _save_full(root, tag, model, user_content, translate_if_full)


def _save_partial(root: Path, tag: str, model: Any, optimizer: Any, user_content: Any, keep: int | None) -> None:
    groups = state.groups

    def write(folder: Path) -> list[str]:
        files: dict[str, Any] = {}
        is_sharded = optimizer is not None and optimizer.is_sharded
        is_first = groups.rank_in("rdp") == 0
        if model is not None and model.sharded is not None:
            assert groups.sharding is not None
            assert groups.slice_sharding is not None
            if 0 in (groups.sharding.number, groups.slice_sharding.number):
                files |= _sharded_files(model, optimizer, groups.sharding)
        else:
            if is_first and model is not None:
                files[f"model_{_rank_info(False)}.pt"] = model.local_state_dict()
            if optimizer is not None and (is_sharded or is_first):
                files |= _optimizer_files(optimizer, _rank_info(is_sharded))
        if groups.rank == 0:
            if model is not None:
                assignment = {path: model.partition_of(path) for path, _ in model.module.named_modules()}
                files["partition.pt"] = {
                    "partitions": len(groups.members["pp"]),
                    "tensor_parallel_degree": len(groups.members["tp"]),
                    "assignment": assignment,
                    "sharding": 1 if groups.sharding is None else groups.sharding.degree,
                }
            if user_content is not None:
                files["user_content.pt"] = user_content
        for name, content in files.items():
            torch.save(content, folder / name)
        if "user_content.pt" in files:
            torch_files.warn_of_classes(folder / "user_content.pt")
        return list(files)

    _save_files(root, _partial_name(tag), "partial", write, keep)


def _save_full(root: Path, tag: str, model: Any, user_content: Any, translate: bool) -> None:
    groups = state.groups

    def write(folder: Path) -> list[str]:
        # A replica gathers its state together, so all of its ranks succeed or fail.
        takes_part = model is not None and (groups.rank_in("rdp") == 0 or model.sharded is not None)
        whole = model.state_dict(gather_to_rank0=True) if takes_part else None
        if groups.rank == 0:
            if whole is not None:
                whole = state.module_manager.to_own_names(whole) if translate else whole
                torch.save(whole, folder / "model")
            if user_content is not None:
                torch.save(user_content, folder / "user_content")
                torch_files.warn_of_classes(folder / "user_content")
        return []

    _save_files(root, tag, "full", write, None)


def _save_files(root: Path, tag: str, kind: str, write: Callable[[Path], list[str]], keep: int | None) -> None:
    """Write a checkpoint's files on all ranks into one staging folder, and rename it when it is complete.

    Args:
        root: The directory of checkpoints.
        tag: The checkpoint's name.
        kind: The kind of the checkpoint, such as ``full``.
        write: Writes this rank's files into a folder, and returns their names.
        keep: Number of checkpoints of this kind to keep; ``None`` for all.

    Raises:
        SMPCheckpointError: The checkpoint could not be written, here or on another rank; raised on all ranks.
    """
    rank, world = state.groups.rank, state.groups.topology.size
    what = f"checkpoint {tag!r} could not be written to `{root}`"
    number = shares.next_save_id()
    attempts: list[Any] = []

    def open_attempt() -> None:
        with errors.translated(_CLASSES):
            attempts.append(
                _core.CheckpointAttempt(os.fspath(root), tag, kind, number, rank, world, True, _FOLDER_SECONDS)
            )

    def begin() -> None:
        _check_tag(tag)
        if rank == 0:
            open_attempt()

    def join() -> None:
        if rank > 0:
            open_attempt()

    def fill() -> None:
        names = write(Path(attempts[0].folder))
        with errors.translated(_CLASSES):
            attempts[0].report(names)

    def commit() -> None:
        if rank == 0:
            with errors.translated(_CLASSES):
                attempts[0].commit(keep)

    try:
        raise_on_all_ranks(begin, CommGroup.WORLD, what, lambda _: {"tag": tag, "kind": kind, "attempt": number})
        for do in (join, fill, commit):
            raise_on_all_ranks(do, CommGroup.WORLD, what)
    except SMPCheckpointError:
        # All ranks have finished. Files that cannot be removed now are removed by the next save.
        for attempt in attempts:
            with contextlib.suppress(errors.SmdistributedError):
                attempt.discard()
        raise
    attempts[0].leave()


def _check_tag(tag: Any) -> None:
    if not isinstance(tag, str):
        raise SMPCheckpointError(f"the tag is a {type(tag).__name__}: expected a str")
    with errors.translated(_CLASSES):
        _core.checkpoint_check_tag(tag)


def _partial_name(tag: str) -> str:
    return tag if not isinstance(tag, str) or tag in ("", _NEWEST) else tag.removesuffix(_PARTIAL) + _PARTIAL


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    load_optimizer_states: bool | None = None,
    safe_globals: Sequence[Any] = (),
    weights_only: bool = True,
) -> Any:
    """Load a checkpoint of :func:`save_checkpoint`, in either format, into the wrapped model and optimizer.

    All ranks call it. Before the model is partitioned, the load waits for the partition. The checkpoint's partition
    is used if it has the same number of partitions. Otherwise each rank reads its tensors from the files of all
    ranks.

    Args:
        path: The directory of checkpoints.
        tag: The checkpoint, with or without ``_partial``; by default the newest partial or sharded one.
        partial: Whether to load the partial or the full checkpoint, if both have the name.
        strict: Whether the checkpoint must contain every parameter.
        load_optimizer: Whether the optimizer is loaded; full checkpoints contain none.
        load_sharded_optimizer_state: With sharded data parallelism, ``False`` loads only master weights and loss scale
            of the optimizer. Otherwise it is ignored with a warning.
        translate_function: Applied to the dict of a full checkpoint.
        load_optimizer_states: An earlier name of ``load_optimizer``.
        safe_globals: Classes and functions that the user content may contain in addition to those that ``torch.load``
            allows, as for ``torch.serialization.safe_globals``.
        weights_only: ``False`` executes any code in the user content: only for files that the caller trusts.

    Returns:
        The user content; ``{}`` if there is none.

    Raises:
        SMPCheckpointError: Files are missing or damaged, do not fit the model, or contain objects whose loading would
        execute code; raised on all ranks.
    """
    if not load_sharded_optimizer_state and state.groups.sharding is None:
        warn_once(
            "`load_sharded_optimizer_state=False` is ignored without `sharded_data_parallel_degree`; "
            "`load_optimizer=False` loads no state of the optimizer"
        )
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states
    root = Path(path)
    what = f"the checkpoint {'' if tag is None else f'{tag!r} '}in `{root}` could not be loaded"
    model, optimizer = state.model, state.optimizer if load_optimizer else None
    tag, kind, folder = raise_on_all_ranks(
        lambda: _find(root, tag, partial), CommGroup.WORLD, what, lambda found: found[:2]
    )

    def read_content(place: Path) -> Any:
        with torch.serialization.safe_globals(list(safe_globals)):
            return torch_files.get(place, weights_only=weights_only)

    if kind == "sharded":
        manager = CheckpointManager(root)
        found = manager.load(
            tag,
            strict=strict,
            load_optimizer=load_optimizer,
            load_sharded_optimizer_state=load_sharded_optimizer_state,
        )
        return {} if found is None else found
    if kind == "partial":
        precision_only = not load_sharded_optimizer_state and state.groups.sharding is not None
        return _resume_partial(Path(folder), model, optimizer, strict, precision_only, what, read_content)

    def read() -> tuple[Any, Any]:
        with errors.translated(_CLASSES):
            other = hugging_face.safetensors_instead(root / tag)
            if other is None:
                _core.checkpoint_verify_file(os.fspath(root / tag))
            content = _core.checkpoint_content(os.fspath(root), tag)
            if content is not None:
                _core.checkpoint_verify_file(content)
        whole = None
        if model is not None:
            if other is None:
                whole = torch_files.get(root / tag)
            else:
                whole = hugging_face.read_safetensors(other, is_deferred=translate_function is None)
            whole = dict(translate_function(whole) if translate_function else whole)
            if other is not None:
                whole = hugging_face.with_all_names(whole, model)
        return whole, {} if content is None else read_content(Path(content))

    whole, content = raise_on_all_ranks(read, CommGroup.WORLD, what)

    def load() -> None:
        assert model is not None, "called for a model alone"
        state_dicts.load_model(model, whole, strict, False)

    if model is not None:
        model._when_partitioned(lambda: raise_on_all_ranks(load, CommGroup.WORLD, what))
    return content


def _find(root: Path, tag: str | None, partial: bool) -> tuple[str, str, str]:
    """Return the name of the checkpoint, its kind, and its folder."""
    if tag is None:
        newest = root / _NEWEST
        if not newest.exists():
            raise SMPCheckpointError(
                f"`{newest}` is missing: there is no complete partial checkpoint; pass the `tag` of a full one"
            )
        tag = newest.read_text().strip()
    _check_tag(tag)
    with errors.translated(_CLASSES):
        sharded = _core.checkpoint_folder(os.fspath(root), tag)
        folder = _core.checkpoint_folder(os.fspath(root), _partial_name(tag))
        manifest = os.path.join(sharded, "manifest.json")
        if os.path.exists(manifest) and _core.CheckpointReader(os.fspath(root), tag).kind == "sharded":
            return tag, "sharded", sharded
    if (partial or tag.endswith(_PARTIAL)) and os.path.isdir(folder):
        return tag, "partial", folder
    if hugging_face.safetensors_instead(root / tag) is None and not (root / tag).is_file():
        raise SMPCheckpointError(f"neither `{folder}` nor `{root / tag}` is there")
    return tag, "full", os.fspath(root)


def _resume_partial(
    folder: Path,
    model: Any,
    optimizer: Any,
    strict: bool,
    precision_only: bool,
    what: str,
    read_content: Callable[[Path], Any],
) -> Any:
    def read_files() -> tuple[Any, Any]:
        _check_files(folder, ["partition.pt", "user_content.pt"])
        saved = None if model is None else torch_files.get(folder / "partition.pt")
        content = folder / "user_content.pt"
        return saved, read_content(content) if content.exists() else {}

    saved, content = raise_on_all_ranks(read_files, CommGroup.WORLD, what)
    if model is None:
        return content
    alike = saved["partitions"] == len(state.groups.members["pp"])
    if alike and not model.is_partitioned:
        model._set_assignment(saved["assignment"])
    elif alike:
        alike = all(model.partition_of(path) == at for path, at in saved["assignment"].items())
    degree = saved.get("tensor_parallel_degree", 1)
    mine = [_rank("pp")] if alike else list(range(saved["partitions"]))
    sharded, sharding = saved.get("sharding", 1), state.groups.sharding
    by_shards = sharded > 1 and degree * saved["partitions"] == 1
    own_shards = by_shards and sharding is not None and sharding.degree == sharded and state.groups.mp_group is None
    if own_shards:
        assert sharding is not None
        models = [f"model_{sharding.rank}.pt"]
    elif by_shards:
        models = [f"model_{shard}.pt" for shard in range(sharded)]
    elif sharded > 1:
        models = _names_of_ranks(folder, "model", mine)
    else:
        # Loads all slices: a rank takes its own from the whole tensor, whatever the saved degree is.
        models = [f"model_{pp}_{tp}.pt" for pp in mine for tp in range(degree)]

    def read() -> tuple[dict[str, Any], list[str]]:
        _check_files(folder, models)
        parts = [torch_files.get(folder / name) for name in models]
        if sharded > 1:
            parts = [{**part.pop("module"), **part} for part in parts]
            divided = slices.named_shards(model.module, degree)
            entries = parts[0] if own_shards else state_dicts.join_models(parts, divided)
        else:
            entries = slices.merge(parts, slices.named_shards(model.module, degree))
        entries.pop(state_dicts.PARTIAL, None)
        if optimizer is None:
            return entries, []
        return entries, _optimizer_names(folder, saved["partitions"], degree, sharded if by_shards else 1)

    entries, optimizers = raise_on_all_ranks(read, CommGroup.WORLD, what, lambda found: bool(found[1]))

    def load() -> None:
        # Strict only for the whole model: one partition's file does not show which names the others have.
        state_dicts.load_model(model, entries, strict, True)

    def load_part(part: Mapping[str, Any]) -> None:
        raise_on_all_ranks(
            lambda: optimizer_state.load_own_part(model, optimizer, part, precision_only), CommGroup.WORLD, what
        )
        optimizer._publish()

    def load_optimizer() -> None:
        own = f"optimizer_{_rank_info(True) if sharding is None else _shard_info(sharding)}.pt"
        has_own = optimizer.is_sharded and alike and own in optimizers
        if all(allgather(has_own, CommGroup.WORLD)):
            part = raise_on_all_ranks(lambda: _optimizer_part(folder, own), CommGroup.WORLD, what)
            mine_here = optimizer_state.local_optimizer(model, optimizer)[optimizer_state.SHARDS]
            fits = part.get(optimizer_state.SHARDS) == mine_here
        else:
            part, fits = {}, False
        if all(allgather(fits, CommGroup.WORLD)):
            load_part(part)
            return
        names = optimizers
        if not by_shards:
            names = [name for name in optimizers if any(name.startswith(f"optimizer_{pp}_") for pp in mine)]

        def merge() -> Any:
            parts = [_optimizer_part(folder, name) for name in names]
            return optimizer_state.merge_optimizers(model, parts, degree)

        merged = raise_on_all_ranks(merge, CommGroup.WORLD, what)
        if optimizer.is_sharded and alike:
            # Each rank has its whole partition, and the other ranks have theirs.
            load_part(merged)
        else:
            optimizer_state.load_optimizer(model, optimizer, merged, precision_only)

    model._when_partitioned(lambda: raise_on_all_ranks(load, CommGroup.WORLD, what))
    if optimizers:
        model._when_partitioned(lambda: raise_on_all_ranks(load_optimizer, CommGroup.WORLD, what))
    return content


#: Entries of an optimizer's state that have a file of their own.
_FP16_STATES = (optimizer_state.MASTER_WEIGHTS, optimizer_state.LOSS_SCALE)


def _optimizer_files(optimizer: Any, info: str) -> dict[str, Any]:
    """Return the optimizer's files of this rank: its state, and master weights and loss scale."""
    found = optimizer.local_state_dict(gather_if_shard=False)
    precision = {key: found.pop(key) for key in _FP16_STATES if key in found}
    files = {f"optimizer_{info}.pt": found}
    if precision:
        files[f"fp16_states_{info}.pt"] = precision
    return files


def _optimizer_part(folder: Path, name: str) -> dict[str, Any]:
    """Read an optimizer's partial state from its files."""
    _check_files(folder, [name])
    found = dict(torch_files.get(folder / name))
    precision = name.replace("optimizer_", "fp16_states_", 1)
    if precision in _listed(folder) or (folder / precision).exists():
        _check_files(folder, [precision])
        found |= torch_files.get(folder / precision)
    return found


def _sharded_files(model: Any, optimizer: Any, sharding: Any) -> dict[str, Any]:
    """Return the files of this rank's shards.

    Scripts that merge them read ``module``, ``partition_count`` and, for master weights, ``fp32_flat_groups``.
    """
    part = model.local_state_dict()
    marks = {key: part.pop(key) for key in state_dicts.MARKS if key in part}
    info = _shard_info(sharding)
    files: dict[str, Any] = {f"model_{info}.pt": {"module": part, **marks}}
    if optimizer is not None:
        found = {**optimizer.local_state_dict(gather_if_shard=False), "partition_count": sharding.degree}
        if optimizer.fp32_partitioned_groups_flat:
            # The state's master weights are views of these tensors, so the file contains them once.
            found["fp32_flat_groups"] = optimizer.fp32_partitioned_groups_flat
        files[f"optimizer_{info}.pt"] = found
    return files


def _shard_info(sharding: Any) -> str:
    """Return how the names of this rank's files of shards end.

    That is the shard's number, which published scripts expect; with pipelines or tensor parallelism, the rank's
    indices.
    """
    return str(sharding.rank) if state.groups.mp_group is None else _rank_info(True)


def _names_of_ranks(folder: Path, what: str, partitions: Sequence[int]) -> list[str]:
    """Return the names of the files of the ranks of some partitions.

    Raises:
        SMPCheckpointError: A partition has no file.
    """
    listed = {*_listed(folder), *(path.name for path in folder.glob(f"{what}_*.pt"))}
    names = []
    for pp in partitions:
        found = sorted(name for name in listed if re.fullmatch(rf"{what}_{pp}_\d+_\d+\.pt", name))
        if not found:
            raise SMPCheckpointError(f"`{folder / f'{what}_{pp}_0_0.pt'}` is missing")
        names += found
    return names


def _optimizer_names(folder: Path, partitions: int, degree: int, sharded: int) -> list[str]:
    """Return the files of the optimizer's states of all partitions, and of all shards if they are sharded.

    The list is empty if the optimizer was not saved.

    Raises:
        SMPCheckpointError: The file of a partition is missing.
    """
    listed = {*_listed(folder), *(path.name for path in folder.glob("optimizer_*.pt"))}
    if sharded > 1:
        wanted = [f"optimizer_{shard}.pt" for shard in range(sharded)]
        return wanted if listed & set(wanted) else []
    names = sorted(name for name in listed if re.fullmatch(r"optimizer_\d+_\d+(_\d+)?\.pt", name))
    for pp, tp in itertools.product(range(partitions), range(degree)) if names else ():
        if not any(re.match(rf"optimizer_{pp}_{tp}\D", name) for name in names):
            raise SMPCheckpointError(f"`{folder / f'optimizer_{pp}_{tp}.pt'}` is missing")
    return names


def _listed(folder: Path) -> list[str]:
    """Return the files in a checkpoint's manifest; none if another program wrote it."""
    with contextlib.suppress(FileNotFoundError):
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return [file["name"] for file in manifest["manifest"]["files"]]
    return []


def _check_files(folder: Path, names: list[str]) -> None:
    """Verify the checksums of files that have one."""
    listed = _listed(folder)
    with errors.translated(_CLASSES):
        if listed:
            reader = _core.CheckpointReader(os.fspath(folder.parent), folder.name)
            reader.check_files([name for name in names if name in listed])


def _rank(group: str) -> int:
    return state.groups.rank_in(group)


def _own_file(f: str, replica: bool) -> str:
    """Return the name of this rank's partial file."""
    without_tensor_parallelism = len(state.groups.members["tp"]) == 1 and not replica
    return f"{f}_{_rank('mp')}" if without_tensor_parallelism else f"{f}_{_rank_info(replica)}"


def _rank_info(replica: bool) -> str:
    """Return the rank as it appears in the name of a partial file."""
    if replica:
        return f"{_rank('pp')}_{_rank('tp')}_{_rank('rdp')}"
    return f"{_rank('pp')}_{_rank('tp')}"


def _next_step(root: Path) -> int:
    def find_next() -> int:
        with errors.translated(_CLASSES):
            found = _core.checkpoint_list(os.fspath(root)) if root.is_dir() else []
        return found[-1][0] + 1 if found else 0

    # All ranks list the checkpoints before any of them saves.
    return raise_on_all_ranks(
        find_next, CommGroup.WORLD, f"the checkpoints in `{root}` could not be listed", lambda step: step
    )
