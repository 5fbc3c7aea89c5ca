"""Every public name of Horovod's modules, and the parameters of its functions: names, order and defaults.

Scripts pass arguments by position and by keyword, so another order or default would break them. Additional parameters
of ours come after the original's, or are keyword-only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect

import pytest

from support import Forked, run_ranks

ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}

#: Abbreviations in the tables below for parameters that occur often.
SHORT = {
    "PS": "process_set=gps",
    "FACTORS": "prescale_factor=1.0, postscale_factor=1.0",
    "NONE": "compression=Compression.none",
    "DEVICES": "device_dense='', device_sparse=''",
}

SESSION = """
init(comm=None, process_sets=None)
shutdown()
is_initialized()
start_timeline(file_path, mark_cycles=False)
stop_timeline()
rank() size() local_rank() local_size() cross_rank() cross_size() is_homogeneous() mpi_threads_supported()
mpi_built() mpi_enabled() gloo_built() gloo_enabled() nccl_built() cuda_built() rocm_built() ddl_built() ccl_built()
"""

SETS = "ProcessSet(ranks_or_comm) add_process_set(process_set) remove_process_set(process_set)"

TORCH = {
    "horovod.torch": f"""
{SESSION} {SETS}
allreduce(tensor, average=None, name=None, NONE, op=None, FACTORS, PS)
allreduce_(tensor, average=None, name=None, op=None, FACTORS, PS)
allreduce_async(tensor, average=None, name=None, op=None, FACTORS, PS)
allreduce_async_(tensor, average=None, name=None, op=None, FACTORS, PS)
grouped_allreduce(tensors, average=None, name=None, NONE, op=None, FACTORS, PS)
grouped_allreduce_(tensors, average=None, name=None, op=None, FACTORS, PS)
grouped_allreduce_async(tensors, average=None, name=None, op=None, FACTORS, PS)
grouped_allreduce_async_(tensors, average=None, name=None, op=None, FACTORS, PS)
sparse_allreduce_async(tensor, name=None, op=Average, PS)
allgather(tensor, name=None, PS)
allgather_async(tensor, name=None, PS)
grouped_allgather(tensors, name=None, PS)
grouped_allgather_async(tensors, name=None, PS)
broadcast(tensor, root_rank, name=None, PS)
broadcast_(tensor, root_rank, name=None, PS)
broadcast_async(tensor, root_rank, name=None, PS)
broadcast_async_(tensor, root_rank, name=None, PS)
alltoall(tensor, splits=None, name=None, PS)
alltoall_async(tensor, splits=None, name=None, PS)
reducescatter(tensor, name=None, NONE, op=Average, PS, FACTORS)
reducescatter_async(tensor, name=None, op=Average, PS, FACTORS)
grouped_reducescatter(tensors, name=None, NONE, op=Average, PS, FACTORS)
grouped_reducescatter_async(tensors, name=None, op=Average, PS, FACTORS)
join(device=-1) barrier(PS) poll(handle) synchronize(handle)
broadcast_parameters(params, root_rank)
broadcast_optimizer_state(optimizer, root_rank, model=None)
broadcast_object(obj, root_rank=0, name=None, PS)
allgather_object(obj, name=None)
DistributedOptimizer(optimizer, named_parameters=None, NONE, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, PS)
SyncBatchNorm(num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
Compression elastic HorovodInternalError global_process_set Average Sum Adasum Min Max Product
""",
    "horovod.torch.mpi_ops": f"""
{SESSION}
handle_average_backwards_compatibility check_installed_version gpu_available num_rank_is_power_2 Compression
HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall
HorovodReducescatter HorovodGroupedReducescatter
_handle_map _basics _allreduce_async _grouped_allreduce_async _allgather_async _grouped_allgather_async _broadcast_async
_alltoall_async _reducescatter_async _grouped_reducescatter_async
""",
    "horovod.torch.mpi_lib_v2": "horovod_torch_poll horovod_torch_wait_and_clear horovod_torch_reset",
    "horovod.torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "horovod.torch.compression": "Compressor NoneCompressor FP16Compressor Compression",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "TorchState ElasticSampler run",
    "horovod.torch.elastic.state": "TorchState StateHandler get_handler_registry set_handler_registry",
    "horovod.torch.elastic.sampler": "ElasticSampler(dataset, shuffle=True, seed=0)",
    "horovod.common.util": """
EXTENSIONS get_ext_suffix() get_extension_full_path(pkg_path, *args)
check_extension(ext_name, ext_env_var, pkg_path, *args)
extension_available(ext_base_name, verbose=False) gpu_available(ext_base_name, verbose=False)
mpi_built(verbose=False) gloo_built(verbose=False) nccl_built(verbose=False) ddl_built(verbose=False) ccl_built(verbose=False)
env(**kwargs) get_average_backwards_compatibility_fun(reduce_ops) num_rank_is_power_2(num_rank) split_list(l, n)
check_installed_version(name, version, exception=None) is_iterable(x) _cache(f)
is_version_greater_equal_than(ver, target)
""",
    "horovod.common.exceptions": """
HorovodInternalError HostsUpdatedInterrupt(skip_sync) HorovodVersionMismatchError(name, version, installed_version)
get_version_mismatch_message(name, version, installed_version)
""",
    "horovod.common.process_sets": f"{SETS} global_process_set _temp_process_set_object _setup _init_process_sets is_iterable",
    "horovod.common.elastic": """
State(bcast_object, get_rank) ObjectState(bcast_object, get_rank, **kwargs) run_fn(func, reset) notification_manager
""",
    "horovod.common.basics": "HorovodBasics",
    "horovod.data": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.data.data_loader_base": "BaseDataLoader AsyncDataLoaderMixin",
}

RUNNER = {
    "horovod": """
run(func, args=(), kwargs=None, num_proc=1, min_num_proc=None, max_num_proc=None, slots=None, reset_limit=None, cooldown_range=None, hosts=None, hostfile=None, host_discovery_script=None, start_timeout=None, ssh_port=None, ssh_identity_file=None, disable_cache=None, output_filename=None, verbose=None, use_gloo=None, use_mpi=None, mpi_args=None, network_interface=None, network_interfaces=None, executable=None, np=None, min_np=None, max_np=None)
__version__
""",
    "horovod.runner": "run _HorovodArgs",
    "horovod.runner.launch": """
parse_args() run_commandline()
run_controller(use_gloo, gloo_run, use_mpi, mpi_run, use_jsrun, js_run, verbosity)
is_gloo_used(use_gloo=None, use_mpi=None, use_jsrun=None)
_run(args) _run_static(args) _run_elastic(args) _is_elastic(args) check_build(verbose=False) gloo_built
_check_all_hosts_ssh_successful(host_addresses, ssh_port=None, ssh_identity_file=None)
""",
    "horovod.runner.run_task": "main",
    "horovod.runner.common.util.config_parser": "LOG_LEVELS set_args_from_config validate_config_args set_env_from_args(env, args)",
    "horovod.runner.common.util.hosts": """
HostInfo SlotInfo INVALID_SLOT_INFO parse_hosts parse_host_files parse_hosts_and_slots
get_host_assignments(hosts, min_num_proc, max_num_proc=None)
""",
    "horovod.runner.common.util.safe_shell_exec": """
execute(command, env=None, stdout=None, stderr=None, index=None, events=None, prefix_output_with_timestamp=False)
prefix_connection GRACEFUL_TERMINATION_TIME_S
""",
    "horovod.runner.common.util.codec": "dumps_base64 loads_base64",
    "horovod.runner.common.util.secret": "make_secret_key compute_digest check_digest HOROVOD_SECRET_KEY",
    "horovod.runner.common.util.timeout": "Timeout(timeout, message) TimeoutException",
    "horovod.runner.common.util.settings": "BaseSettings Settings",
    "horovod.runner.common.util.env": "get_env_rank_and_size() is_exportable(v)",
    "horovod.runner.common.util.host_hash": "host_hash(salt=None) _hash(string)",
    "horovod.runner.common.util.tiny_shell_exec": "execute(command, env=None)",
    "horovod.runner.util.threads": "in_thread on_event execute_function_multithreaded",
    "horovod.runner.util.streams": "Pipe",
    "horovod.runner.util.remote": "get_ssh_command get_remote_command",
    "horovod.runner.util.lsf": "LSFUtils",
    "horovod.runner.js_run": """
js_run(settings, nics, env, command, stdout=None, stderr=None) is_jsrun_installed() generate_jsrun_rankfile(settings, path=None)
""",
    "horovod.runner.gloo_run": """
gloo_run(settings, nics, env, server_ip, command) launch_gloo launch_gloo_elastic create_slot_env_vars create_run_env_vars
get_run_command register_shutdown_event _get_min_start_hosts
""",
    "horovod.runner.mpi_run": """
mpi_available(env=None) mpi_run(settings, nics, env, command, stdout=None, stderr=None) _get_mpi_implementation(env=None)
""",
    "horovod.runner.common.util.network": """
AckResponse AckStreamResponse BasicService(service_name, key, nics=None)
BasicClient(service_name, addresses, key, verbose=0, match_intf=False, probe_timeout=20, attempts=3)
BasicClient._send(self, req, stream=None) get_local_intfs(nic=None)
""",
    "horovod.runner.util.network": "get_local_intfs(nic=None) get_local_host_intfs() get_local_host_addresses() get_driver_ip(nics)",
    "horovod.runner.common.service.task_service": """
BasicTaskService(name, index, key, nics=None, command_env=None, verbose=0)
BasicTaskClient(service_name, task_addresses, key, verbose=0, match_intf=False)
BasicTaskClient.run_command(self, command, env, capture_stdout=False, capture_stderr=False, prefix_output_with_timestamp=False)
BasicTaskClient.stream_command_output(self, stdout=None, stderr=None)
RunCommandRequest(command, env, capture_stdout=False, capture_stderr=False, prefix_output_with_timestamp=False)
StreamCommandOutputRequest StreamCommandStdOutRequest StreamCommandStdErrRequest CommandOutputNotCaptured
""",
    "horovod.runner.common.service.driver_service": """
BasicDriverService(num_proc, name, key, nics=None)
BasicDriverClient(service_name, driver_addresses, key, verbose=0, match_intf=False)
""",
    "horovod.runner.elastic.discovery": """
HostDiscovery HostDiscoveryScript(discovery_script, slots) FixedHosts(host_slots) HostManager(discovery, cooldown_range=None)
HostManager.order_available_hosts(available_hosts, ordered_hosts)
""",
    "horovod.runner.elastic.driver": """
ElasticDriver(rendezvous, discovery, min_num_proc, max_num_proc, timeout=None, reset_limit=None, cooldown_range=None, verbose=0)
ElasticDriver.host_assignments
""",
    "horovod.runner.elastic.worker": "HostUpdateResult WorkerNotificationManager",
    "horovod.runner.elastic.settings": "ElasticSettings",
    "horovod.runner.elastic.constants": "RESET_LIMIT_EXCEEDED_MESSAGE",
}

KERAS_OPTIMIZER = (
    "optimizer, name=None, DEVICES, NONE, sparse_as_dense=False, gradient_predivide_factor=1.0, op=Average, "
    "backward_passes_per_step=1, average_aggregated_gradients=False"
)
KERAS = f"""
{SESSION} {SETS} Average Sum Adasum Min Max Product Compression callbacks elastic
allreduce(value, name=None, average=None, FACTORS, op=None, NONE)
allgather(value, name=None) broadcast(value, root_rank, name=None) reducescatter(value, name=None, op=Average)
broadcast_global_variables(root_rank)
load_model(filepath, custom_optimizers=None, custom_objects=None, NONE, legacy_opts=False)
DistributedOptimizer({KERAS_OPTIMIZER}, num_groups=0, groups=None, PS, scale_local_gradients=True)
PartialDistributedOptimizer({KERAS_OPTIMIZER}, groups=None, PS, local_layers=None, scale_local_gradients=True)
"""
CALLBACKS = """
BroadcastGlobalVariablesCallback(root_rank, device='', local_variables=None)
MetricAverageCallback(device='')
LearningRateScheduleCallback(initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True, steps_per_epoch=None)
LearningRateWarmupCallback(initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0)
"""
KERAS_ELASTIC = """
KerasState(model, optimizer=None, **kwargs) CommitStateCallback(state, batches_per_commit=1)
UpdateBatchStateCallback(state) UpdateEpochStateCallback(state) run(func)
"""
TAPE = "gradtape, DEVICES, NONE, sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None, PS"

TENSORFLOW = {
    "horovod.tensorflow": f"""
{SESSION} {SETS} Average Sum Adasum Min Max Product Compression elastic global_process_set HorovodInternalError
allreduce(tensor, average=None, DEVICES, NONE, op=None, FACTORS, name=None, PS, ignore_name_scope=False)
grouped_allreduce(tensors, average=None, DEVICES, NONE, op=None, FACTORS, PS, ignore_name_scope=False, name=None)
allgather(tensor, name=None, ignore_name_scope=False, PS)
grouped_allgather(tensors, name=None, ignore_name_scope=False, PS)
broadcast(tensor, root_rank, name=None, ignore_name_scope=False, PS)
broadcast_(variables, root_rank, name=None, PS)
alltoall(tensor, splits=None, name=None, ignore_name_scope=False, PS)
reducescatter(tensor, device_dense='', NONE, op=Average, name=None, PS, ignore_name_scope=False, FACTORS)
grouped_reducescatter(tensors, device_dense='', NONE, op=Average, PS, FACTORS)
join() barrier(PS)
broadcast_variables(variables, root_rank, PS, inplace=False)
broadcast_global_variables(root_rank)
BroadcastGlobalVariablesHook(root_rank, device='')
broadcast_object(obj, root_rank=0, session=None, name=None, PS)
allgather_object(obj, session=None, name=None, PS)
broadcast_object_fn(root_rank=0, session=None, name=None, PS)
rank_op(name=None) local_rank_op(name=None) local_size_op(name=None) size_op(process_set_id=0, name=None)
process_set_included_op(process_set_id=0, name=None)
DistributedOptimizer(optimizer, name=None, use_locking=False, DEVICES, NONE, sparse_as_dense=False, backward_passes_per_step=1, op=Average, gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None, PS, scale_local_gradients=True)
DistributedGradientTape({TAPE}, scale_local_gradients=True)
PartialDistributedGradientTape({TAPE}, local_layers=None, scale_local_gradients=True)
SyncBatchNormalization LocalGradientAggregationHelper util
_executing_eagerly() _make_subgraph(f) _cache(f) vars_to_refs(vars) refs_to_vars(refs) split_list(l, n)
gpu_available(ext_base_name, verbose=False) check_num_rank_power_of_2(num_rank) handle_average_backwards_compatibility
_allreduce(tensor, name=None, op=Sum, FACTORS, ignore_name_scope=False, PS)
_grouped_allreduce(tensors, name=None, op=Sum, FACTORS, ignore_name_scope=False, PS)
""",
    "horovod.tensorflow.mpi_ops": f"""
{SESSION} handle_average_backwards_compatibility check_installed_version gpu_available
MPI_LIB _load_library _normalize_name(name) check_num_rank_power_of_2 _check_has_gpu _basics
_allreduce(tensor, name=None, op=Sum, FACTORS, ignore_name_scope=False, PS)
_grouped_allreduce(tensors, name=None, op=Sum, FACTORS, ignore_name_scope=False, PS)
_reducescatter(tensor, name=None, op=Sum, ignore_name_scope=False, PS, FACTORS)
_grouped_reducescatter(tensors, name=None, op=Sum, ignore_name_scope=False, PS, FACTORS)
""",
    "horovod.tensorflow.functions": "broadcast_object broadcast_object_fn allgather_object broadcast_variables",
    "horovod.tensorflow.compression": "Compressor NoneCompressor FP16Compressor Compression",
    "horovod.tensorflow.util": "_executing_eagerly() _make_subgraph(f) _cache(f) vars_to_refs refs_to_vars",
    "horovod.tensorflow.sync_batch_norm": "SyncBatchNormalization(fused=False, **kwargs)",
    "horovod.tensorflow.gradient_aggregation": "LocalGradientAggregationHelper",
    "horovod.tensorflow.gradient_aggregation_eager": "LocalGradientAggregationHelperEager",
    "horovod.tensorflow.elastic": """
run(func) TensorFlowState(variables=None, session=None, **kwargs)
TensorFlowKerasState(model, optimizer=None, backend=None, **kwargs)
""",
    "horovod.tensorflow.data.compute_worker": "main(dispatchers, dispatcher_side, filename, timeout)",
    "horovod.tensorflow.keras": KERAS,
    "horovod.tensorflow.keras.callbacks": CALLBACKS
    + "BestModelCheckpoint(monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch')",
    "horovod.tensorflow.keras.elastic": KERAS_ELASTIC,
    "horovod.keras": KERAS,
    "horovod.keras.callbacks": CALLBACKS
    + "BestModelCheckpoint(monitor='val_loss', verbose=0, mode='auto', save_freq='epoch')",
    "horovod.keras.elastic": KERAS_ELASTIC,
    "horovod._keras": """
create_distributed_optimizer CallableList load_model allreduce allgather broadcast reducescatter broadcast_global_variables
""",
    "horovod._keras.callbacks": """
BroadcastGlobalVariablesCallbackImpl MetricAverageCallbackImpl LearningRateScheduleCallbackImpl LearningRateWarmupCallbackImpl
""",
    "horovod._keras.elastic": "CommitStateCallbackImpl UpdateBatchStateCallbackImpl UpdateEpochStateCallbackImpl",
}


def entries(text):
    """Yields each name in a table with its parameters, or with None where the table does not list them."""
    depth, start = 0, 0
    text = " ".join(text.split()) + " "
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == " " and depth == 0:
            if text[start:at]:
                name, bracket, arguments = text[start:at].partition("(")
                yield name, arguments[:-1] if bracket else None
            start = at + 1


def default(value):
    if isinstance(value, type) and value.__name__ == "NoneCompressor":
        return "Compression.none"
    return "gps" if type(value).__name__ == "ProcessSet" else repr(value)


def arguments_of(function):
    """Returns a function's parameters in the tables' notation."""
    words = []
    for parameter in inspect.signature(function).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        value = "" if parameter.default is parameter.empty else f"={default(parameter.default)}"
        words.append(f"{star}{parameter.name}{value}")
    return words


def differences(modules):
    found = []
    for module, text in modules.items():
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            found.append(f"{module}: {error}")
            continue
        for name, arguments in entries(text):
            try:
                attribute = functools.reduce(getattr, name.split("."), imported)
            except AttributeError:
                found.append(f"{module}.{name} is missing")
                continue
            if arguments is None:
                continue
            for short, long in SHORT.items():
                arguments = arguments.replace(short, long)
            arguments = arguments.replace("op=Average", "op=0").replace("op=Sum", "op=1")
            expected = arguments.split(", ") if arguments else []
            own = arguments_of(attribute)
            # Additional parameters of ours come last and have a default.
            if own[: len(expected)] != expected or not all("=" in more or "*" in more for more in own[len(expected) :]):
                found.append(f"{module}.{name}({', '.join(own)}): expected ({', '.join(expected)})")
    return found


def names_of_torch():
    assert not differences(TORCH | RUNNER), "\n".join(differences(TORCH | RUNNER))


def names_of_tensorflow():
    assert not differences(TENSORFLOW), "\n".join(differences(TENSORFLOW))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("framework", "body"),
    [("torch", names_of_torch), ("tensorflow", names_of_tensorflow)],
    ids=["torch", "tensorflow"],
)
def test_names_and_arguments(framework, body):
    """The assertions are in `names_of_tensorflow` and `names_of_torch`, which run on each rank."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    run_ranks(body, 1, launcher=Forked(framework), env=ENV, timeout=100)
