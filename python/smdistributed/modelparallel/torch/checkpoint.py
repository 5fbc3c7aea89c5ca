"""``smp.save``, ``smp.load``, ``smp.save_checkpoint`` and ``smp.resume_from_checkpoint``: the documented files, which plain
``torch.load`` reads without executing anything, and the sharded format of :class:`CheckpointManager`.

A file is written beside its place and renamed, a folder as well, and ``newest`` comes last: what has a name is complete.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPValidationError
from smdistributed.modelparallel.objects import CommGroup
from smdistributed.modelparallel.torch import hugging_face, state_dicts
from smdistributed.modelparallel.torch.communication import barrier, together
from smdistributed.modelparallel.torch.manager import CheckpointManager
from smdistributed.modelparallel.torch.state import state

_NEWEST = "newest"
_PARTIAL = "_partial"


def save(
    obj: Any,
    f: str,
    partial: bool = True,
    pickle_module: Any = pickle,
    pickle_protocol: int = 2,
    v3: bool = False,
    pickel_module: Any = None,
) -> None:
    """
    ``torch.save``, to a file of this rank or, with ``partial=False``, to ``f`` itself.

    Args:
        obj: what is saved.
        f: path; a partial file has the rank in its name.
        v3: whether the replica is in the name as well, for sharded states.
    """
    if not isinstance(f, str):
        raise SMPValidationError(f"the file is a {type(f).__name__}: expected a path as str")
    path = Path(_own_file(f, v3) if partial else f)
    _put(obj, path, pickle_module=pickel_module or pickle_module, pickle_protocol=pickle_protocol)


def load(
    f: str, map_location: Any = None, pickle_module: Any = pickle, partial: bool = True, **pickle_load_args: Any
) -> Any:
    """
    ``torch.load``, of this rank's file or, with ``partial=False``, of ``f`` itself. Nothing in the file is executed, unless
    ``weights_only=False`` is given.

    Raises:
        SMPCheckpointError: the file is missing, or holds what would have to be executed.
    """
    pickle_load_args.pop("back_compat", None)
    if pickle_load_args.get("weights_only") is False:
        pickle_load_args["pickle_module"] = pickle_module
    if not partial:
        return _get(Path(f), map_location, **pickle_load_args)
    # Then earlier names, and those of sharded states.
    names = [_own_file(f, False), f"{f}_{_rank_info(False)}", f"{f}_{_rank('mp')}", _own_file(f, True)]
    for name in dict.fromkeys(names):
        if Path(name).exists():
            return _get(Path(name), map_location, **pickle_load_args)
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
    """
    Saves a checkpoint; all ranks call it.

    Args:
        path: a folder that all ranks see; made if it is not there.
        tag: name; of a partial checkpoint ``path/{tag}_partial``, of a full one ``path/{tag}``.
        partial: a file of each rank, or one of the whole model, without the optimizer.
        model, optimizer: the wrapped ones.
        user_content: anything that can be pickled; what ``torch.load`` reads without executing anything can be resumed from.
        translate_if_full: accepted; models keep their own names, so there is nothing to translate.
        num_kept_partial_checkpoints: remove the oldest partial ones beyond that.
        format: ``"torch"``, or ``"sharded"``: that of :class:`CheckpointManager`, at ``path/{tag}``.

    Raises:
        SMPCheckpointError: it could not be written, here or on another rank.
    """
    del translate_if_full
    if format not in ("torch", "sharded"):
        raise SMPValidationError(f"`format` is {format!r}: expected 'torch' or 'sharded'")
    root = Path(path)
    if format == "sharded":
        manager = CheckpointManager(root, keep=num_kept_partial_checkpoints, asynchronous=False)
        # Steps order checkpoints; these have names only.
        manager.save(_next_step(root), user_content, tag=tag)
        barrier()
        return
    if partial:
        _save_partial(root, tag, model, optimizer, user_content, num_kept_partial_checkpoints)
    else:
        _save_full(root, tag, model, user_content)


def _save_partial(root: Path, tag: str, model: Any, optimizer: Any, user_content: Any, keep: int | None) -> None:
    groups = state.groups
    name = tag.removesuffix(_PARTIAL) + _PARTIAL
    place, folder = root / name, root / f".{name}.new"

    def start() -> None:
        if groups.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def write() -> None:
        if groups.rank_in("rdp") == 0:
            info = _rank_info(False)
            if model is not None:
                _put(model.local_state_dict(), folder / f"model_{info}.pt")
            if optimizer is not None:
                _put(optimizer.local_state_dict(), folder / f"optimizer_{info}.pt")
        if groups.rank == 0:
            if model is not None:
                assignment = {path: model.partition_of(path) for path, _ in model.module.named_modules()}
                _put({"partitions": len(groups.members["pp"]), "assignment": assignment}, folder / "partition.pt")
            if user_content is not None:
                _put(user_content, folder / "user_content.pt")

    def finish() -> None:
        if groups.rank == 0:
            _take_place(root, place, folder, keep)

    for do in (start, write, finish):
        together(do, CommGroup.WORLD, f"checkpoint `{place}` could not be written")


def _take_place(root: Path, place: Path, folder: Path, keep: int | None) -> None:
    """Gives what was written in ``folder`` its name, ``place``; of others, ``keep`` in all stay."""
    if place.exists():
        old = root / f".{place.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
        folder.rename(place)
        shutil.rmtree(old)
    else:
        folder.rename(place)
    _put_text(place.name, root / _NEWEST)
    if keep is not None:
        others = [other for other in root.glob(f"*{_PARTIAL}") if other.is_dir() and other != place]
        others.sort(key=lambda other: other.stat().st_mtime_ns, reverse=True)
        for other in others[max(keep, 1) - 1 :]:
            away = root / f".{other.name}.gone"
            other.rename(away)
            shutil.rmtree(away)


def _save_full(root: Path, tag: str, model: Any, user_content: Any) -> None:
    groups = state.groups

    def write() -> None:
        # A replica gathers its state, and all of its ranks succeed or fail in that.
        whole = model.state_dict(gather_to_rank0=True) if groups.rank_in("rdp") == 0 and model is not None else None
        if groups.rank != 0:
            return
        root.mkdir(parents=True, exist_ok=True)
        if whole is not None:
            _put(whole, root / tag)
        if user_content is not None:
            _put(user_content, root / f"user_content_{tag}")
        else:
            (root / f"user_content_{tag}").unlink(missing_ok=True)

    together(write, CommGroup.WORLD, f"checkpoint `{root / tag}` could not be written")


def resume_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    load_optimizer_states: bool | None = None,
) -> Any:
    """
    Loads what :func:`save_checkpoint` saved, in either format, into the wrapped model and optimizer; all ranks call it.

    Before the model is divided, it is loaded when it is, and divided as the checkpoint was, if there are as many partitions.
    With another number, each rank takes what it holds from the files of all.

    Args:
        tag: which, with or without ``_partial``; by default the newest partial or sharded one.
        partial: whether a partial or a full one is meant, where both have the name.
        strict: whether every parameter must be there.
        load_optimizer: whether the optimizer is loaded; full checkpoints have none.
        load_sharded_optimizer_state: accepted; of sharded data parallelism, which is not there yet.
        translate_function: applied to the dict of a full checkpoint.
        load_optimizer_states: an earlier name of ``load_optimizer``.

    Returns:
        The user content; ``{}`` if there is none.

    Raises:
        SMPCheckpointError: files are missing, do not fit the model, or hold what would have to be executed.
    """
    del load_sharded_optimizer_state
    if load_optimizer_states is not None:
        load_optimizer = load_optimizer_states
    root = Path(path)
    if tag is None:
        newest = root / _NEWEST
        if not newest.exists():
            raise SMPCheckpointError(
                f"`{newest}` is missing: there is no complete partial checkpoint; pass the `tag` of a full one"
            )
        tag = newest.read_text().strip()
    model, optimizer = state.model, state.optimizer if load_optimizer else None
    if (root / tag / "manifest.json").exists():
        manager = CheckpointManager(root)
        found = manager.load(tag, strict=strict, load_optimizer=load_optimizer)
        return {} if found is None else found
    folder = root / (tag.removesuffix(_PARTIAL) + _PARTIAL)
    old = root / f".{folder.name}.old"
    if not folder.is_dir() and old.is_dir():
        # Whoever saved was killed between two names: its successor was about to take its place.
        folder = old
    if (partial or tag.endswith(_PARTIAL)) and folder.is_dir():
        return _resume_partial(folder, model, optimizer, strict)
    other = hugging_face.safetensors_instead(root / tag)
    if other is None and not (root / tag).is_file():
        raise SMPCheckpointError(f"neither `{folder}` nor `{root / tag}` is there")
    if model is not None:
        whole = _get(root / tag) if other is None else hugging_face.read_safetensors(other, model)
        model.load_state_dict(translate_function(whole) if translate_function else whole, strict=strict)
    content = root / f"user_content_{tag}"
    return _get(content) if content.exists() else {}


def _resume_partial(folder: Path, model: Any, optimizer: Any, strict: bool) -> Any:
    if model is not None:
        saved = _get(folder / "partition.pt")
        alike = saved["partitions"] == len(state.groups.members["pp"])
        if alike and not model.is_partitioned:
            model.divide_as(saved["assignment"])
        elif alike:
            alike = all(model.partition_of(path) == at for path, at in saved["assignment"].items())
        tp = _rank("tp")
        mine = [_rank("pp")] if alike else range(saved["partitions"])
        files = [folder / f"model_{pp}_{tp}.pt" for pp in mine]
        entries: dict[str, Any] = {}
        for file in files:
            entries.update(_get(file))
        entries.pop(state_dicts.PARTIAL, None)
        # Strict about the whole; of one partition's file nothing can be said of the others.
        model.when_partitioned(lambda: state_dicts.load_model(model, entries, strict, True))
        files = [folder / f"optimizer_{pp}_{tp}.pt" for pp in mine]
        if optimizer is not None and any(file.exists() for file in files):
            parts = [_get(file) for file in files]

            def resume_optimizer() -> None:
                state_dicts.load_optimizer(model, optimizer, state_dicts.merge_optimizers(model, parts))

            model.when_partitioned(resume_optimizer)
    content = folder / "user_content.pt"
    return _get(content) if content.exists() else {}


def _rank(group: str) -> int:
    return state.groups.rank_in(group)


def _own_file(f: str, replica: bool) -> str:
    """The partial file of this rank."""
    without_tensor_parallelism = len(state.groups.members["tp"]) == 1 and not replica
    return f"{f}_{_rank('mp')}" if without_tensor_parallelism else f"{f}_{_rank_info(replica)}"


def _rank_info(replica: bool) -> str:
    """The rank in the name of a partial file."""
    if replica:
        return f"{_rank('pp')}_{_rank('tp')}_{_rank('rdp')}"
    return f"{_rank('pp')}_{_rank('tp')}"


def _next_step(root: Path) -> int:
    from smdistributed import _core

    def look() -> int:
        found = _core.checkpoint_list(os.fspath(root)) if root.is_dir() else []
        return found[-1][0] + 1 if found else 0

    # Nobody saves until all have looked.
    return together(look, CommGroup.WORLD, f"the checkpoints in `{root}` could not be listed")


def _put(obj: Any, path: Path, **options: Any) -> None:
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as file:
        torch.save(obj, file, **options)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _put_text(text: str, path: Path) -> None:
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def _get(path: Path, map_location: Any = "cpu", **options: Any) -> Any:
    if not path.exists():
        raise SMPCheckpointError(f"`{path}` is missing")
    options.setdefault("weights_only", True)
    try:
        return torch.load(path, map_location=map_location, **options)
    except pickle.UnpicklingError as error:
        raise SMPCheckpointError(
            f"`{path}` holds what would have to be executed to be read; if you trust it, allow its classes with "
            "`torch.serialization.add_safe_globals`, or `smp.load(..., weights_only=False)`"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise SMPCheckpointError(f"`{path}` is damaged: {error}") from error
