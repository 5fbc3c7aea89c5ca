"""The core: control goes through this module, tensors go through the frameworks' ops.

`tests/unit/test_core.py` compares this file with the module.
"""

import os
from collections.abc import Sequence
from pathlib import Path

__version__: str

def init() -> None:
    """Joins the job that the environment describes; returns when all ranks have joined."""

def shutdown() -> None:
    """Leaves the job. Does nothing without a session."""

def finish() -> None:
    """Called last in a process: `shutdown()`, then, in the process that serves the rendezvous, waits for the others."""

def start_negotiation() -> None:
    """
    Starts the negotiation of collectives by name among all ranks, so that a rank that never calls one is reported as
    missing. Does not wait for the others, and does nothing on a second call.
    """

def is_initialized() -> bool:
    """Whether this process is in a job, or was forked from a process that is."""

def rank() -> int:
    """Global rank."""

def size() -> int:
    """Number of processes of the job."""

def local_rank() -> int:
    """Rank on this host."""

def local_size() -> int:
    """Number of processes on this host."""

def session_id() -> int:
    """A number that is equal on all ranks and new for each `init()`."""

def is_authenticated() -> bool:
    """Whether all members have proved a secret of the job; false for a job on several hosts without a secret."""

def new_group(ranks: Sequence[int]) -> int:
    """Creates a group of global ranks, in their order inside the group, and returns its id. All members call it."""

def remove_group(group: int) -> None:
    """Removes a group; each member calls it for itself."""

def group_ranks(group: int = 0) -> list[int]:
    """Global ranks of a group, in group order; 0 is the group of all."""

def start_world(ranks: Sequence[int] | None = None) -> None:
    """Creates the world from these ranks of the job, or from all; does nothing if there is one."""

def ranks_and_sizes() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], bool]:
    """
    Rank and size in the world, among its ranks on this host, and among those with this local rank; and whether all
    hosts have equally many ranks.
    """

def world_ranks() -> list[int]:
    """The ranks of the world, as ranks of the job."""

def register_process_sets(lists: Sequence[Sequence[int]]) -> list[int]:
    """Creates or finds a process set for each list; returns their ids. Collective."""

def add_process_set(ranks: Sequence[int]) -> int:
    """Creates a process set and returns its id. Collective."""

def remove_process_set(id: int) -> bool:
    """Removes a process set; false if there was none. Collective."""

def process_sets() -> list[tuple[int, list[int]]]:
    """Ids of all process sets, and their ranks."""

def measure_bucket_bytes(group: int, device: int) -> int | None:
    """
    The best size in bytes of a reducer's buckets on a CUDA device, if `SMD_AUTOTUNE` enables its measurement for the
    group. Collective.
    """

def are_unchanged(containers: list[tuple[object, object, bool]]) -> bool:
    """Returns whether containers are as they were.

    `containers` has one tuple for each of them: the container, a list or dictionary with its earlier content, and
    whether that content is the container's attributes and not its items. Identical objects in the same order count as
    unchanged."""

def bucket_bytes(bucket_cap_mb: float | None = None, on_device: bool = False) -> int:
    """The size in bytes of a bucket of `bucket_cap_mb` MiB, or the default for gradients on a device or in CPU memory."""

def bucket_sizes(cap_bytes: int) -> list[int]:
    """The sizes in bytes of the first bucket and of all others, if none may exceed this size."""

def barrier(group: int = 0) -> None:
    """Returns when every member of the group has called it."""

def report_failure(message: str) -> None:
    """Reports to the job that this rank failed with `message`; waits of the others end with it. Does nothing without a
    session.
    """

def interrupt() -> None:
    """
    Ends every wait of this process and its part in the job, for a Ctrl-C that a waiting thread cannot notice itself.
    Does nothing without a session.
    """

def plan_gradients(
    graph: int,
    gradients: Sequence[tuple[str, Sequence[int], str]],
    absent: Sequence[str],
    bucket_bytes: int,
    wire: str | None = None,
    sum: bool = False,
    on_device: bool = False,
    group: int = 0,
) -> int:
    """
    Registers a reducer specification for a graph's next gradients and returns its number: name, shape and type of
    each gradient, and the names of variables without a gradient. `graph` is the caller's number of the graph, 0
    outside of graphs; `wire` the type to which wider floats are cast for the reduction; `on_device` says that
    gradients are on a CUDA device; `group` is the id of the group that reduces them, 0 for all ranks.
    """

def note_fallback(reason: str) -> None:
    """Counts a slower path, by its name in the metrics."""

def running_fallbacks(pid: int | None = None) -> list[tuple[int, int, list[tuple[str, int]]]]:
    """
    Returns the slower paths of the ranks of this user that run on this host, in their order: the session, the rank, and
    for each reason how often. With `pid`, only those of the ranks that this process has started or is.
    """

def timeline_now() -> int:
    """Nanoseconds on the timeline's clock, or 0 if no timeline is written."""

def report_replica_checksum(variables: str, checksum: int, ranks: Sequence[int], remedy: str, is_final: bool) -> None:
    """
    Writes a checksum of the variables `variables` that this rank is about to train together with `ranks`. If checksums
    differ, the first of the ranks logs a warning with the call `remedy`: at once if `is_final`, otherwise in the
    second step if nothing was broadcast until then.
    """

def note_broadcast() -> None:
    """Notes that variables are broadcast, so ranks train from equal values."""

def begin_step(name: str) -> None:
    """Notes the beginning of a step of a reduction that the core cannot observe."""

def start_mpi() -> bool:
    """Initialises MPI in all processes of a job that an MPI launcher started, unless the script has. Every rank calls it.
    Returns whether any thread may call MPI.
    """

def timeline_stage(
    kind: str, stage: int, microbatch: int, start: int, input_stages: Sequence[int] = ..., end: int = 0
) -> None:
    """
    Records an event of the pipeline for a microbatch, from `start` (of `timeline_now`) until `end`, or until now if
    that is 0. `kind` is `forward`, `backward`, `input`, `weight`, `send`, `receive`, `wait` or `synchronous` (a call
    that could not be pipelined); `input_stages` are the stages whose values it used.

    # Errors
    `ValueError` for another kind.
    """

def start_horovod_timeline(path: str, mark_cycles: bool) -> None:
    """From now on, rank 0 writes a timeline of collectives by name to this file; other ranks do nothing."""

def stop_horovod_timeline() -> None:
    """Ends that timeline; the file is complete when this returns."""

def parameter_defaults() -> str:
    """Every key of the `modelparallel` parameters with its default, as JSON."""

def check_parameters(text: str) -> tuple[str, list[str]]:
    """Returns the known keys of a JSON dictionary with normalised values, and warnings; raises for an invalid value."""

def check_parameter_rules(text: str) -> None:
    """Raises if keys of a JSON dictionary contradict each other."""

def is_this_host(name: str) -> bool:
    """Whether a name is this host's name, or one of its addresses."""

def next_hosts_update(seconds: float) -> tuple[float, int] | None:
    """
    Returns the time, in seconds since 1970, at which the launcher of an elastic job found changed hosts, and whether
    places were removed (1), added (2) or both (3); waits at most `seconds`. `None` if nothing changed, or without a
    session.
    """

def declined_rounds(seen: int, seconds: float) -> int:
    """
    Waits until the number of rounds of optimizers whose gradients were held and are reduced by name after all is not
    `seen`, at most `seconds`; returns the number.
    """

def combine_host_updates(handled: int, latest: int, kinds: int) -> tuple[int, int, int]:
    """
    Combines the ranks' knowledge of changed hosts: the latest change that was handled and the latest one that is
    known, in microseconds since 1970, and the kinds of unhandled changes. Every rank calls it with its own values.
    """

def is_started_by_mpi() -> bool:
    """Whether an MPI launcher started this process."""

def mpi_plugin() -> str:
    """The path of the MPI plug-in for this host, which is compiled if necessary."""

def is_launched() -> bool:
    """Whether the environment has a launcher's variables."""

def missing_environment() -> list[tuple[str, str]]:
    """
    Names and values of the variables of torch's `env://` that the launcher did not set, for the caller to set them.
    The next `init()` ignores them.
    """

def setting(name: str) -> str:
    """The value of a setting of the environment reference, or its default."""

def cache_folder(name: str) -> tuple[Path, str | None]:
    """
    The folder `name` for compiled libraries, which only this user and root can write to; and a warning if it is not
    in the configured cache folder.
    """

def untrusted(path: str | os.PathLike[str]) -> str | None:
    """Why a user other than this one and root may have written a file; `None` if no other user can have."""

def error_codes() -> list[str]:
    """The stable names of all kinds of errors."""

def raise_interrupt() -> None:
    """Raises the exception of a signal handler from the last interrupted wait of this thread, if there is one."""

def shim_sources() -> dict[str, str]:
    """Name and text of every source file of the shims, so that an installed package can build them anywhere."""

def smdrun(argv: Sequence[str], python: str) -> int:
    """Runs `smdrun` with this command line (the program's name first) and returns its exit code. The GIL is released;
    Ctrl-C goes to the ranks and raises no `KeyboardInterrupt` here."""

def partition_modules(
    modules: Sequence[object],
    values: Sequence[tuple[int, Sequence[int], int]],
    tasks: Sequence[tuple[int, int, int]],
    ties: Sequence[Sequence[int]],
    partitions: int,
    memory_weight: float,
    microbatches: int,
    active_microbatches: int | None,
    schedule: str,
    memory_bytes: int | None = None,
) -> tuple[list[int], str, list[float]]:
    """
    Divides modules over `partitions`: returns the partition of each module, a table, and the costs of each partition.

    `values` pass between modules (producer, consumers, bytes). `tasks` are the costs for the host if modules are
    split (module, module that runs instead, nanoseconds). `ties` are modules that must be on one partition. If every
    partition needs at most `memory_bytes`, only time is balanced.
    """

def operation_nanoseconds(flops: float, moved_bytes: int) -> float:
    """Estimates the nanoseconds of an operation that computes `flops` and reads and writes `moved_bytes`."""

def task_nanoseconds() -> int:
    """The nanoseconds that one task of a pipeline costs the host."""

def partition_to_json(partitions: dict[str, int]) -> str:
    """Formats a partition file."""

def partition_from_json(name: str, text: str, partitions: int) -> dict[str, int]:
    """Parses a partition file into modules and partitions; `name` is the file's name, for errors."""

class ElasticHosts:
    """The hosts of an elastic job, oldest first, and the hosts that are banned, for a time or permanently."""

    def __init__(self, cooldown: tuple[float, float] | None = None) -> None: ...
    def discover(self, found: Sequence[tuple[str, int]]) -> None:
        """Sets the names and slots of the hosts that the discovery has found."""
    def ban(self, host: str) -> None:
        """Bans a host after a worker failed there."""
    def is_banned(self, host: str) -> bool:
        """Whether a host may not be used now."""
    def usable(self) -> list[tuple[str, int]]:
        """Names and slots of the hosts that may be used, oldest first."""

class ElasticDriver:
    """Decides which workers run on which hosts, and when a session begins. The caller executes its actions."""

    def __init__(
        self,
        hosts: ElasticHosts,
        num_proc: int,
        min_num_proc: int,
        max_num_proc: int,
        reset_limit: int | None,
        timeout: float,
    ) -> None: ...
    def discover(self, found: Sequence[tuple[str, int]]) -> None:
        """Sets the names and slots of the hosts that the discovery has found."""
    def ban(self, host: str) -> None:
        """Bans a host; its workers are stopped."""
    def is_banned(self, host: str) -> bool:
        """Whether a host may not be used now."""
    def usable(self) -> list[tuple[str, int]]:
        """Names and slots of the hosts that may be used, oldest first."""
    def worker_ready(self, worker: int) -> None:
        """Records that a worker waits for a rank in the next session."""
    def worker_ended(self, worker: int, failure: str | None = None) -> None:
        """Records that a worker has ended: successfully, or with `failure`."""
    def stop_all(self, why: str) -> None:
        """Ends the job for the reason `why`."""
    def tick(self) -> float | None:
        """Processes timeouts; returns the seconds until the next call is due, or `None`."""
    def take_actions(self) -> list[tuple[str, list[int], tuple[str, int] | None, int, str]]:
        """Returns the actions since the last call, in order: a kind, workers, the host and slot of `start`, a number (`notify`: 1
        for removed, 2 for added), a text (`log`). Kinds are `start`, `stop`, `remove`, `assign_ranks` (workers in the order of
        their ranks), `notify` and `log`."""
    def outcome(self) -> tuple[bool, str] | None:
        """Returns `None` until all workers have ended; then whether the job succeeded, and the reason if not."""

class StepOperations:
    """The operations of a step in topological order, and the variables that they use: for each variable its shape as text, its
    bytes, and whether it binds a layer to a partition."""

    def __init__(self, operations: Sequence[object], variables: Sequence[tuple[str, int, bool]]) -> None: ...
    def partition_layers(
        self,
        layers: Sequence[str],
        partitions: int,
        memory_weight: float,
        microbatches: int,
        active_microbatches: int | None,
        schedule: str,
    ) -> tuple[list[int | None], str]:
        """Partitions layers, given their paths in the order of their first calls. Returns the partition of each layer that has
        variables, and a table."""

    def place(
        self, layers: Sequence[int | None], default: int | None, variables: Sequence[int | None]
    ) -> StepPlacement:
        """Places every operation, by the partitions of layers and variables; `default` is the partition of operations that a
        script with manual partitions does not assign."""

class StepPlacement:
    """The partition on which each operation of a step runs."""

    def variables(self) -> list[int | None]:
        """Partitions of the variables; `None` for a variable that every rank holds."""

    def free(self) -> list[int]:
        """Numbers of the operations that each rank computes for itself."""

    def cut(
        self,
        wanted: Sequence[Sequence[tuple[int, int]]],
        rank: int,
        microbatches: int,
        schedule: str,
        active_microbatches: int | None,
    ) -> tuple[
        list[
            tuple[
                str,
                int | None,
                int,
                bool,
                bool,
                list[int],
                list[tuple[int, int]],
                list[tuple[int, int]],
                list[tuple[int, int]],
            ]
        ],
        list[tuple[int, int]],
        list[tuple[tuple[int, int], tuple[int, list[int]]]],
        list[tuple[int, int]],
        list[tuple[int, tuple[int, list[int]]]],
        list[str],
    ]:
        """Cuts the step for `rank`. Returns its segments in topological order, the order of the anchored ones (segment and
        microbatch), results that pass between ranks, those that anchored segments compute with their order (number and
        microbatch), segments whose effects are signalled to other ranks, and a line for everything that must be equal on all
        ranks."""

class ParallelTopology:
    """The pipeline, tensor and data parallel coordinates of all ranks of a job."""

    def __init__(self, size: int, pp: int, tp: int, placement: str) -> None:
        """Lays ranks out.

        Args:
            size: Ranks of the job.
            pp: Pipeline stages.
            tp: Tensor-parallel parts; the rest of the ranks are replicas.
            placement: ``"cluster"``, ``"spread"``, or the letters D, P and T in the order in which ranks are counted: the last one varies fastest.

        Raises:
            ConfigError: ``size`` is not a multiple of ``pp * tp``, or the placement is unknown.
        """

    @property
    def size(self) -> int:
        """Ranks of the job."""

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Pipeline stage, tensor part and replica of a rank."""

    def group(self, kind: str, rank: int) -> list[int]:
        """Global ranks, ascending, of the group that ``rank`` is in; ``kind`` is ``"pp"``, ``"tp"``, ``"rdp"``, ``"mp"`` or ``"dp"``."""

    def groups(self, kind: str) -> list[list[int]]:
        """All groups of a kind, by their first ranks."""

class LossScale:
    """The factor of losses in 16-bit training, which follows from the steps whose gradients overflowed."""

    def __init__(
        self,
        scale: float,
        dynamic: bool = False,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        """Starts at a scale.

        Args:
            scale: The first scale.
            dynamic: Whether the scale is adapted, by the other arguments.
            scale_factor: Factor of growth, and divisor after an overflow.
            scale_window: Steps without an overflow before it grows.
            min_scale: The smallest scale.
            delayed_shift: Number of overflows at which the scale shrinks; the count restarts when the scale grows.
            consecutive_hysteresis: Whether that count also restarts after a step without an overflow.

        Raises:
            InvalidArgumentError: A value is invalid.
        """

    @property
    def scale(self) -> float:
        """The factor of the next loss."""

    def update(self, overflow: bool) -> None:
        """Ends a step; ``overflow`` says whether any rank found a gradient that is not finite."""

    def state(self) -> tuple[float, int, int]:
        """The state for a checkpoint: the scale, the steps since its last change, and the overflows until it shrinks."""

    def restore(self, scale: float, clean_steps: int, tolerance: int) -> None:
        """Continues from a checkpoint."""

def shard_parameters(
    sizes: Sequence[int], ranks: int, alignment: int
) -> tuple[int, list[list[tuple[int, int, int, int]]]]:
    """
    Concatenates parameters of these sizes and divides them evenly: returns the elements of a shard, and the pieces of
    each rank.
    """

def shard_elems(size: int, ranks: int) -> int:
    """Number of elements of each rank's shard of a parameter of this size, with padding."""

def sharding_groups(members: Sequence[int], degree: int) -> tuple[list[list[int]], list[list[int]]]:
    """
    Divides a data-parallel group: returns the ranks that together hold one model, and the ranks that hold the same
    shard.
    """

class StageGraph:
    """The stages of a microbatch: groups of tasks that one rank runs without waiting for another."""

    def __init__(self) -> None: ...
    def extend(
        self,
        tasks: Sequence[
            tuple[
                int,
                int,
                Sequence[int],
                Sequence[int],
                Sequence[tuple[int, bool]],
                tuple[int, int, int],
                tuple[int, int],
            ]
        ],
        early: bool,
    ) -> list[int]:
        """Adds tasks after the existing ones: for each its rank and level, its inputs, the earlier tasks that it follows without
        using their values, for its outputs the bytes and whether they require gradients, its costs, and the bytes that it
        keeps for the first and for the second part of its backward. Returns the numbers of their stages."""

    def set_outputs(self, task: int, outputs: Sequence[tuple[int, bool]]) -> int:
        """Sets the outputs of a task that was added before they were known; returns its stage."""

    def finish(self, backward_roots: Sequence[int], returned: Sequence[int]) -> None:
        """Sets the backward roots, and the values that are returned."""

    def stage_of(self, value: int) -> int:
        """The stage that computes a value."""

    def stages(
        self,
    ) -> list[
        tuple[
            int,
            list[int],
            dict[int, list[int]],
            dict[int, list[int]],
            dict[int, list[int]],
            list[int],
            list[int],
            bool,
            bool,
        ]
    ]:
        """For every stage: its rank, tasks, inputs, outputs and gradients that it receives (each by the other stage), values that
        it returns, backward roots, whether it runs early, and whether it has a backward."""

    def plan(
        self,
        rank: int,
        ranks: int,
        microbatches: int,
        schedule: str,
        active_microbatches: int | None,
        memory_bytes: int | None,
    ) -> list[tuple[str, int, int, int | None]]:
        """Returns the actions of `rank` in order: kind (`F`, `B`, `I`, `W`, `SF`, `RF`, `SB`, `RB`), stage, microbatch and, for a
        transfer, the stage at the other end. All ranks pass the same other arguments and get their parts of one program."""

class CheckpointSaver:
    """Saves this rank's part of checkpoints; one save runs at a time."""

    def __init__(
        self,
        directory: str,
        rank: int,
        world: int,
        threads: int,
        durable: bool,
        keep: int | None,
        timeout_seconds: float,
        exchange: bool = True,
    ) -> None: ...
    def open(self, tag: str, attempt: int) -> None:
        """Begins a save; raises if this rank cannot save the checkpoint. Rank 0 calls it before the others."""

    def save(
        self,
        tag: str,
        step: int,
        attempt: int,
        layout: str,
        content: str,
        slices: Sequence[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], int, bool]],
        asynchronous: bool,
        owner: object = None,
    ) -> None:
        """
        Saves; `layout` and `content` are JSON. Each place is a name, element type, shape of the whole tensor, start and shape of
        the slice, address, and whether `owner` holds the memory. Memory that `owner` holds must not change while `owner` lives,
        and other memory not until the call returns.
        """

    def wait(self) -> None:
        """Waits for the running save."""

    def is_busy(self) -> bool:
        """Whether a save is running."""

    def discard(self) -> None:
        """Removes the files of the last attempt, after all ranks know that it has failed."""

class CheckpointAttempt:
    """An attempt to save a checkpoint whose files the caller writes; each rank creates it."""

    def __init__(
        self,
        directory: str,
        tag: str,
        kind: str,
        number: int,
        rank: int,
        world: int,
        durable: bool,
        timeout_seconds: float,
    ) -> None: ...
    @property
    def folder(self) -> str:
        """The folder for the files."""

    def report(self, names: Sequence[str]) -> None:
        """Tells rank 0 which files this rank has written."""

    def commit(self, keep: int | None = None) -> None:
        """Completes the checkpoint when all ranks have reported, and keeps the newest `keep` of its kind; called by rank 0."""

    def leave(self) -> None:
        """Ends an attempt that is complete."""

    def discard(self) -> None:
        """Ends an attempt after all ranks know that it has failed: rank 0 removes its files."""

class CheckpointReader:
    """A complete checkpoint: the one named `tag`, or the newest sharded one."""

    def __init__(self, directory: str, tag: str | None = None) -> None: ...
    @property
    def tag(self) -> str:
        """Its name."""

    @property
    def kind(self) -> str:
        """Its kind: `sharded` or `partial`."""

    @property
    def folder(self) -> str:
        """The folder of its files."""

    @property
    def step(self) -> int:
        """The number of its training step."""

    @property
    def layout(self) -> str:
        """How ranks were laid out, as JSON."""

    @property
    def content(self) -> str:
        """The content that was saved in addition to tensors, as JSON."""

    def tensors(self) -> list[tuple[str, str, list[int]]]:
        """Name, element type and shape of every tensor."""

    def read(self, targets: Sequence[tuple[str, Sequence[int], Sequence[int], int, int]], threads: int) -> None:
        """Reads slices into memory; each target is a name, start, shape, address and size in bytes."""

    def check_files(self, names: Sequence[str]) -> None:
        """Verifies files that the caller wrote against their checksums."""

    def verify(self, threads: int) -> None:
        """Reads everything and compares all checksums."""

def checkpoint_prepare(directory: str, durable: bool) -> None:
    """Creates a directory of checkpoints, if necessary, and removes the remains of interrupted attempts in it."""

def checkpoint_newest(directory: str) -> str | None:
    """The name of the newest complete sharded checkpoint, if there is one."""

def checkpoint_folder(directory: str, tag: str) -> str:
    """The folder of a sharded or partial checkpoint, whether or not it exists."""

def checkpoint_content(directory: str, tag: str) -> str | None:
    """The file with the user content of a full checkpoint, if it has any."""

def checkpoint_verify_file(path: str) -> None:
    """Verifies a file of a full checkpoint against the checksum of its mark, if it has one."""

def checkpoint_shares(
    tensors: Sequence[tuple[int | None, int, bool]], replica: int, replicas: int
) -> list[tuple[int, tuple[int, int] | None]]:
    """Returns which parts of the tensors that `replica` holds it writes: the tensor's index and, unless it writes all
    rows, the first row and the number of rows. Each entry of `tensors` is the length along the first axis (`None` for a
    scalar), the size in bytes, and whether all replicas hold the tensor.
    """

def checkpoint_check_tag(tag: str) -> None:
    """Raises if this cannot be a checkpoint's name."""

def checkpoint_clean(directory: str) -> None:
    """Removes the remains of interrupted attempts, except of attempts that a running process holds."""

def checkpoint_list(directory: str, kind: str = "sharded") -> list[tuple[int, str]]:
    """Complete checkpoints of a kind with their steps, in ascending order of steps."""
