"""horovodrun without processes: options, configuration, hosts, and its helper modules."""

import io
import os
import pickle
import queue
import signal
import threading
import time
import warnings
from unittest import mock

import pytest

from horovod.common import driven, environment
from horovod.common.basics import HorovodBasics
from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, ScalarError, at_submission
from horovod.runner import _HorovodArgs, gloo_run, js_run, launch, mpi_run, run
from horovod.runner.common.util import (
    codec,
    config_parser,
    env,
    hosts,
    safe_shell_exec,
    secret,
    settings,
    timeout,
    tiny_shell_exec,
)
from horovod.runner.driver import driver_service
from horovod.runner.elastic import discovery, worker
from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager
from horovod.runner.util import lsf, network, streams, threads


def parsed(line):
    return launch.parse_args([*line.split(), "python", "train.py", "-np", "9"])


def variables(line):
    return config_parser.set_env_from_args({}, parsed(line))


def test_options_become_variables():
    assert variables("-np 2") == {}
    given = "-np 2 --fusion-threshold-mb 10 --cycle-time-ms 20 --cache-capacity 512 --hierarchical-allreduce --no-torus-allreduce"
    assert variables(given) == {
        "HOROVOD_FUSION_THRESHOLD": str(10 * 1024 * 1024),
        "HOROVOD_CYCLE_TIME": "20.0",
        "HOROVOD_CACHE_CAPACITY": "512",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_TORUS_ALLREDUCE": "0",
    }
    assert variables("-np 2 --autotune-log-file a.csv") == {}, "the option must have no effect without --autotune"
    assert variables("-np 2 --autotune --autotune-log-file a.csv")["HOROVOD_AUTOTUNE_LOG"] == "a.csv"
    assert variables("-np 2 --timeline-mark-cycles") == {}
    assert variables("-np 2 --timeline-filename t.json --timeline-mark-cycles") == {
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }
    assert variables("-np 2 --no-stall-check")["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert variables("-np 2 --log-level INFO --log-without-timestamp") == {
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }
    args = parsed(
        "-np 2 --min-np 1 --max-num-proc 4 --slots 2 --blacklist-cooldown-range 1 9 -p 22 -prefix-timestamp --tcp"
    )
    assert (args.min_num_proc, args.max_num_proc, args.slots, args.cooldown_range) == (1, 4, 2, [1, 9])
    assert args.ssh_port == 22
    assert args.prefix_output_with_timestamp
    assert args.tcp_flag
    assert args.command == ["python", "train.py", "-np", "9"]
    # A missing command is an error only when the job starts.
    args = launch.parse_args(["-np", "2"])
    with pytest.raises(ValueError, match="the command to run is missing"):
        launch._run(args)
    with pytest.raises(ValueError, match="the number of processes is 0: expected at least one"):
        launch._run(parsed("-np 0"))
    assert parsed("-np 2 --network-interface a --network-interfaces b,c").nics == {"a", "b", "c"}


def test_interfaces_keep_the_order_in_which_they_are_given(monkeypatch):
    """Each host uses the first of the interfaces that it has."""
    line = "-np 2 --network-interfaces ib1,ib0 --network-interface eth0 --network-interface ib1"
    nics = parsed(line).nics
    assert {"eth0", "ib0", "ib1"} == nics
    assert list(pickle.loads(pickle.dumps(nics))) == ["ib1", "ib0", "eth0"]
    for more, name in (("", "gloo_run"), (" --min-np 1 --host-discovery-script ./found", "gloo_run_elastic")):
        with mock.patch.object(launch, name) as runs:
            launch._run(parsed(line + more))
        env = next(given for given in runs.call_args.args if isinstance(given, dict))
        assert env["HOROVOD_GLOO_IFACE"] == env["NCCL_SOCKET_IFNAME"] == "ib1,ib0,eth0"
    with (
        mock.patch.object(launch, "_run", side_effect=RuntimeError("far enough")) as runs,
        pytest.raises(RuntimeError, match="far enough"),
    ):
        run(print, num_proc=2, network_interfaces="ib1,ib0")
    assert list(runs.call_args.args[0].nics) == ["ib1", "ib0"]
    assert gloo_run.create_run_env_vars("here", nics, 1)["HOROVOD_GLOO_IFACE"] == "ib1"
    given_settings = settings.Settings(hosts="a:1,b:1", num_proc=2, verbose=0, run_func_mode=True, nics=nics)
    assert list(driver_service.get_common_interfaces(given_settings, ["a", "b"], ["b"])) == ["ib1", "ib0", "eth0"]
    assert " -iface ib1 " in line_of_mpirun("MPICH", given_settings, nics, {}, ["x"])[0]
    monkeypatch.setattr(network, "get_local_host_intfs", lambda: {"eth0": "10.0.0.1", "ib0": "10.0.0.2"})
    assert network.get_driver_ip(nics) == "10.0.0.2"


def test_options_without_effect_warn():
    elastic = "-np 1 --max-np 8 --reset-limit 3 --elastic-timeout 9 --slots-per-host 2"
    for line, expected in (
        (elastic, "--max-np, --slots-per-host, --elastic-timeout, --reset-limit. Only jobs with --min-np"),
        ("-np 1 --tcp --binding-args=-x", "--tcp, --binding-args. MPI starts processes only with --mpi"),
    ):
        with mock.patch.object(launch, "gloo_run"), pytest.warns(UserWarning, match="without effect") as caught:
            launch._run(parsed(line))
        assert [expected in str(each.message) for each in caught] == [True]
    for line, name in (
        (elastic + " --min-np 1 --host-discovery-script ./found", "gloo_run_elastic"),
        ("-np 1 --mpi --tcp", "mpi_run"),
        ("-np 1", "gloo_run"),
    ):
        with (
            mock.patch.object(launch, name),
            mock.patch.object(launch, "mpi_built", return_value=True),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            launch._run(parsed(line))


@pytest.mark.parametrize(
    "line", ["", "-np x", "-np 2 --gloo --mpi", "-np 2 -H a:1 -hostfile b", "-np 2 --log-level LOUD"]
)
def test_invalid_command_lines_are_rejected(line):
    with pytest.raises(SystemExit):
        parsed(line)


@pytest.mark.parametrize("line", ["--cycle-time-ms -1", "--autotune-gaussian-process-noise 1.5", "--cache-capacity -3"])
def test_numbers_out_of_range_are_rejected(line):
    with pytest.raises(ValueError, match="must be"):
        parsed(f"-np 2 {line}")


@pytest.mark.parametrize(
    "name",
    [
        "FUSION_THRESHOLD",
        "CACHE_CAPACITY",
        "STALL_CHECK_TIME_SECONDS",
        "DISABLE_GROUP_FUSION",
        "GLOO_TIMEOUT_SECONDS",
        "DYNAMIC_PROCESS_SETS",
        "TIMELINE_MARK_CYCLES",
    ],
)
def test_errors_name_the_invalid_variable(name, monkeypatch):
    """The error names the variable that was set, not the core's own setting."""
    monkeypatch.setenv(f"HOROVOD_{name}", "much")
    session = HorovodBasics()
    with pytest.raises(ValueError, match=f"Horovod initialization failed: `HOROVOD_{name}` is `much`"):
        session.init()
    session.shutdown()


def test_variables_without_effect_warn_once(monkeypatch):
    monkeypatch.setattr(environment, "_warned", False)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    with pytest.warns(UserWarning, match=r"no effect in OpenSMD: HOROVOD_CYCLE_TIME$"):
        environment.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.check()
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "ccl")
    with pytest.raises(ValueError, match="expected gloo or mpi"):
        environment.check()


def test_hints_and_supported_variables_do_not_warn(monkeypatch):
    monkeypatch.setattr(environment, "_warned", False)
    hints = ("HIERARCHICAL_ALLREDUCE", "HIERARCHICAL_ALLGATHER", "TORUS_ALLREDUCE", "ENABLE_ASYNC_COMPLETION")
    for name in (*hints, "LOG_HIDE_TIME", "GLOO_TIMEOUT_SECONDS", "DISABLE_GROUP_FUSION", "THREAD_AFFINITY"):
        monkeypatch.setenv(f"HOROVOD_{name}", "1")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        environment.check()
    assert not warned


def test_boolean_variables_accept_other_numbers(monkeypatch):
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "2")
    session = HorovodBasics()
    session.init()
    assert session.is_initialized()
    session.shutdown()


def test_invalid_process_sets_are_refused():
    with pytest.raises(
        ValueError, match=r"Horovod initialization failed: `process_sets` is \[\[0\]\]: expected a list of"
    ):
        HorovodBasics().init(process_sets=[[0]])


def test_options_are_read_from_sys_argv(monkeypatch):
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "2", "--fusion-threshold-mb", "10"])
    args = launch.parse_args()
    assert (args.num_proc, args.fusion_threshold_mb, args.command) == (2, 10, [])


def test_the_loop_around_an_elastic_function():
    state, reset, listener = mock.MagicMock(), mock.Mock(), mock.Mock()
    events = [HorovodInternalError("lost"), HostsUpdatedInterrupt(True), HostsUpdatedInterrupt(False), 7]
    assert run_fn(mock.Mock(side_effect=events, __name__="train"), reset)(state) == 7
    assert (state.sync.call_count, state.restore.call_count, reset.call_count, state.on_reset.call_count) == (
        3,
        1,
        3,
        3,
    )
    # An invalid argument does not start a reset: no rank could use it.
    with pytest.raises(ScalarError):
        run_fn(mock.Mock(side_effect=ScalarError("a scalar"), __name__="train"), reset)(state)
    manager = WorkerNotificationManager()
    manager.init()
    manager.register_listener(listener)
    manager.handle_hosts_updated(1.0, HostUpdateResult.added)
    manager.remove_listener(listener)
    manager.handle_hosts_updated(2.0, HostUpdateResult.removed)
    listener.on_hosts_updated.assert_called_once_with(1.0, 2)


def test_a_failed_registration_at_the_driver_is_repeated(monkeypatch):
    manager = WorkerNotificationManager()
    with (
        mock.patch.object(driven, "is_driven", return_value=True),
        mock.patch.object(driven, "listen", side_effect=[OSError("the store does not answer"), None]) as listen,
    ):
        with pytest.raises(OSError, match="does not answer"):
            manager.init()
        manager.init()
        manager.init()
    assert listen.call_args_list == [mock.call(manager)] * 2
    monkeypatch.setattr(driven, "_slot", ("here", "0"))
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    with mock.patch.object(worker, "WorkerNotificationService") as service:
        service.return_value.addresses.return_value = {}
        with pytest.raises(RuntimeError, match="the launcher must give each worker the job's secret"):
            driven.listen(manager)
        service.assert_not_called()
        monkeypatch.setenv(secret.HOROVOD_SECRET_KEY, codec.dumps_base64(secret.make_secret_key()))
        with pytest.raises(OSError, match="refused"):
            driven.listen(manager)
    service.return_value.shutdown.assert_called_once_with()


def test_options_win_over_the_file(tmp_path, capsys):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text(
        "controller: gloo\nparams:\n  fusion_threshold_mb: 32\n  cycle_time_ms: 5\n  colour: red\n"
        "stall_check:\n  enabled: false\nlogging:\n  level: INFO\n"
    )
    for line in (f"-np 2 --cycle-time-ms 7 --config-file {file}", f"-np 2 --config-file {file} --cycle-time-ms 7"):
        args = parsed(line)
        assert (args.fusion_threshold_mb, args.cycle_time_ms, args.no_stall_check) == (32, 7.0, True)
        assert args.use_gloo
        assert args.log_level == "INFO"
    assert "unknown key `params.colour`" in capsys.readouterr().err
    file.write_text("controller: smoke\n")
    with pytest.raises(ValueError, match="No such controller supported"):
        parsed(f"-np 2 --config-file {file}")


def test_ranks_are_given_out_host_by_host():
    slots = hosts.get_host_assignments(hosts.parse_hosts("a:2,b:3,c:1"), 5, 5)
    found = [(slot.hostname, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size) for slot in slots]
    assert found == [("a", 0, 2, 0, 2), ("a", 1, 2, 0, 2), ("b", 0, 3, 1, 2), ("b", 1, 3, 1, 2), ("b", 2, 3, 0, 1)]
    assert [slot.rank for slot in slots] == list(range(5))
    assert {slot.size for slot in slots} == {5}
    assert slots[3].to_response_string() == "3,5,1,3,1,2"
    with pytest.raises(ValueError, match="Requested more processes"):
        hosts.get_host_assignments(hosts.parse_hosts("a:2"), 3)
    for text in ("a", "a:x", "a:2,"):
        with pytest.raises(ValueError, match="Invalid host input"):
            hosts.parse_hosts(text)


def test_host_files(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\n172.31.32.7 slots=8\n172.31.33.9 slots = 4\nlast\n")
    assert hosts.parse_host_files(str(file)) == "172.31.32.7:8,172.31.33.9:4,last:1"


def test_the_choice_of_controller(monkeypatch):
    calls = {name: mock.Mock() for name in ("gloo", "mpi", "js")}

    def controller(mpi, gloo, lsf=False, **use):
        for call in calls.values():
            call.reset_mock()
        monkeypatch.setattr(launch, "mpi_built", lambda verbose: mpi)
        monkeypatch.setattr(launch, "gloo_built", lambda verbose: gloo)
        monkeypatch.setattr(launch.lsf.LSFUtils, "using_lsf", staticmethod(lambda: lsf))
        monkeypatch.setattr(launch, "is_jsrun_installed", lambda: lsf)
        launch.run_controller(
            use.get("gloo_"), calls["gloo"], use.get("mpi_"), calls["mpi"], use.get("js_"), calls["js"], 0
        )
        return [name for name, call in calls.items() if call.called]

    assert controller(False, True, gloo_=True) == ["gloo"]
    assert controller(True, True, mpi_=True) == ["mpi"]
    assert controller(True, True) == ["mpi"]
    assert controller(True, True, lsf=True) == ["js"]
    assert controller(False, True) == ["gloo"]
    for text, arguments in (
        ("Gloo support has not been built", {"mpi": True, "gloo": False, "gloo_": True}),
        ("MPI support has not been built", {"mpi": False, "gloo": True, "mpi_": True}),
        ("did not detect an LSF job", {"mpi": True, "gloo": True, "js_": True}),
        ("Neither MPI nor Gloo support has been built", {"mpi": False, "gloo": False}),
    ):
        with pytest.raises(ValueError, match=text):
            controller(**arguments)


def line_of_mpirun(found, given_settings, nics, env, command):
    """Returns the command line that the shell gets, without surplus spaces, and its environment."""
    with (
        mock.patch.object(mpi_run, "_get_mpi_implementation", return_value=found),
        mock.patch.object(safe_shell_exec, "execute", return_value=0) as execute,
    ):
        mpi_run.mpi_run(given_settings, nics, env, command)
    return " ".join(execute.call_args.args[0].split()), execute.call_args.kwargs["env"]


def test_command_lines_of_mpirun(monkeypatch):
    given_settings = settings.Settings(hosts="a:1,b:1", num_proc=2, verbose=0, run_func_mode=True, ssh_port=22)
    monkeypatch.setenv("PYTHONPATH", "ours")
    env = {"HOROVOD_X": "1", "PATH": "/bin", "OLDPWD": "/"}
    line, passed = line_of_mpirun("OpenMPI", given_settings, {"eth1", "eth0"}, env, ["python", "a b.py"])
    assert line == (
        "mpirun --allow-run-as-root --tag-output -np 2 -H a:1,b:1 -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib "
        '-mca plm_rsh_args "-p 22" -mca btl_tcp_if_include eth0,eth1 -x NCCL_SOCKET_IFNAME=eth0,eth1 -x HOROVOD_X -x PATH '
        "python 'a b.py'"
    )
    assert passed == {**env, "PYTHONPATH": "ours"}, "mpirun itself needs PYTHONPATH; processes get only `env`"
    given_settings.tcp_flag, given_settings.extra_mpi_args, given_settings.output_filename = True, "--more", "logs"
    line, passed = line_of_mpirun("SpectrumMPI", given_settings, None, {}, ["x"])
    assert passed["NCCL_IB_DISABLE"] == "1"
    assert line == (
        "mpirun --allow-run-as-root --tag-output -np 2 -H a:1,b:1 -bind-to socket -map-by socket -rank-by core -tcp "
        '-mca plm_rsh_args "-p 22" --output-filename logs -x NCCL_IB_DISABLE --more x'
    )
    # MPICH's launcher and Intel's, which belongs to the same family.
    for found in ("MPICH", "IntelMPI"):
        line, _ = line_of_mpirun(found, given_settings, {"eth0"}, env, ["x"])
        assert line == (
            'mpirun -l -np 2 -ppn 1 -hosts a,b -bootstrap=ssh -bootstrap-exec-args "-p 22" -iface eth0 '
            "-genv NCCL_SOCKET_IFNAME eth0 -outfile-pattern logs -genvlist HOROVOD_X,NCCL_IB_DISABLE,PATH --more x"
        )
    given_settings.binding_args = "-bind-to core"
    given_settings.hosts = ",".join(f"host{number}:1" for number in range(64))
    line, _ = line_of_mpirun("OpenMPI", given_settings, None, {}, ["x"])
    assert (
        "-bind-to core -mca pml ob1 -mca btl ^openib -mca plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent 64"
        in line
    )


def test_the_number_of_hosts_may_be_given():
    given_settings = settings.Settings(
        hosts="those of a file", num_hosts=64, num_proc=64, verbose=0, run_func_mode=True
    )
    line, _ = line_of_mpirun("OpenMPI", given_settings, None, {}, ["x"])
    assert "-H those of a file " in line
    assert line.endswith("-mca plm_rsh_no_tree_spawn true -mca plm_rsh_num_concurrent 64 x")


def test_mpirun_that_fails_or_is_missing():
    given_settings = settings.Settings(hosts="a:1", num_proc=1, verbose=0, run_func_mode=True)
    with (
        mock.patch.object(mpi_run, "_get_mpi_implementation", return_value="OpenMPI"),
        mock.patch.object(safe_shell_exec, "execute", return_value=3),
        pytest.raises(RuntimeError, match="mpirun failed with exit code 3"),
    ):
        mpi_run.mpi_run(given_settings, None, {}, ["true"])
    with pytest.raises(Exception, match="env argument must be a dict"):
        mpi_run.mpi_run(given_settings, None, "env", ["true"])
    for answer, expected in (
        (("mpirun (Open MPI) 4.1.4", 0), "OpenMPI"),
        (("OpenRTE", 0), "OpenMPI"),
        (("IBM Spectrum MPI", 0), "SpectrumMPI"),
        (("HYDRA build details:", 0), "MPICH"),
        (("Intel(R) MPI Library", 0), "IntelMPI"),
        (("Another MPI", 0), "Unknown"),
        (("mpirun: broken", 1), "Missing"),
        (None, "Missing"),
    ):
        with mock.patch.object(tiny_shell_exec, "execute", return_value=answer):
            assert mpi_run._get_mpi_implementation({}) == expected
            if expected in ("Unknown", "Missing"):
                with pytest.raises(Exception, match="does not find an installed MPI"):
                    mpi_run.mpi_run(given_settings, None, {}, ["true"])


def test_jobs_of_lsf(monkeypatch, tmp_path):
    results = {
        "mpirun": "Open MPI",
        "nvidia-smi -L": "GPU 0: one\nGPU 1: two\n",
        "lscpu": "Thread(s) per core: 4\nCore(s) per socket:  3\nSocket(s): 2",
    }
    answer = lambda command, env=None: (next(text for name, text in results.items() if name in command), 0)  # noqa: E731
    monkeypatch.setattr(tiny_shell_exec, "execute", answer)
    monkeypatch.setattr(js_run, "_get_mpi_implementation_flags", lambda tcp, env=None: (["-tcp"], [], None))
    monkeypatch.setattr(js_run, "is_jsrun_installed", lambda: True)
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "batch 1 host1 42 host2 42")
    assert lsf.LSFUtils.get_compute_hosts() == ["host1", "host2"]
    assert lsf.LSFUtils.get_num_processes() == 4
    given_settings = settings.Settings(hosts="host1:2,host2:2", num_proc=3, verbose=0, run_func_mode=True)
    file = tmp_path / "ranks"
    assert js_run.generate_jsrun_rankfile(given_settings, str(file)) == str(file)
    assert file.read_text() == (
        "overlapping_rs: allow\ncpu_index_using: logical\n\n"
        "rank: 0: { hostname: host1; cpu: {0-11} ; gpu: * ; mem: * }\n"
        "rank: 1: { hostname: host1; cpu: {12-23} ; gpu: * ; mem: * }\n\n"
        "rank: 2: { hostname: host2; cpu: {0-11} ; gpu: * ; mem: * }\n"
    )
    for hosts_of_job, text in (
        ("host1:3", "greater than number of GPUs per host '2'"),
        ("host1:2", "Not enough slots"),
    ):
        with pytest.raises(ValueError, match=text):
            js_run.generate_jsrun_rankfile(settings.Settings(hosts=hosts_of_job, num_proc=3))
    monkeypatch.setattr(js_run, "generate_jsrun_rankfile", lambda settings: "/ranks")
    given_settings.output_filename, given_settings.extra_mpi_args = "a folder", "-x"
    with mock.patch.object(safe_shell_exec, "execute", side_effect=[0, 3]) as execute:
        js_run.js_run(given_settings, None, {"A": "1"}, ["python", "a b.py"])
        assert execute.call_args.args[0] == (
            "jsrun --erf_input /ranks --stdio_stderr 'a folder' --stdio_stdout 'a folder' --smpiargs '-tcp -x' python 'a b.py'"
        )
        with pytest.raises(RuntimeError, match="jsrun failed with exit code 3"):
            js_run.js_run(given_settings, None, {}, ["true"])
    # Without options, the job uses all hosts and GPUs that LSF has assigned.
    monkeypatch.setattr(launch, "_check_all_hosts_ssh_successful", lambda *args, **kwargs: True)
    with mock.patch.object(launch, "js_run") as launched:
        launch._run(launch.parse_args(["--jsrun", "python", "train.py"]))
    assert (launched.call_args.args[0].hosts, launched.call_args.args[0].num_proc) == ("host1:2,host2:2", 4)
    monkeypatch.undo()
    with pytest.raises(Exception, match="does not find the jsrun command"):
        js_run.js_run(given_settings, None, {}, ["true"])


@pytest.mark.parametrize(
    ("allotted", "gpus", "options", "expected"),
    [
        ("a 8 b 8", 0, "-np 16", ("a:8,b:8", 16)),
        ("a 8 b 4", 0, "", ("a:8,b:4", 12)),
        ("a 8 b 8", 2, "", ("a:2,b:2", 4)),
        ("launch 1 a 8 b 8", 0, "-np 9", ("a:8,b:8", 9)),
        ("launch 1 a 8", 4, "", ("a:4", 4)),
        ("a 1 b 1", 0, "", ("a:1,b:1", 2)),
        ("a 1", 0, "", ("a:1", 1)),
    ],
)
def test_hosts_of_lsf(monkeypatch, allotted, gpus, options, expected):
    """LSF alone decides where the processes run."""
    answer = ("".join(f"GPU {number}: one\n" for number in range(gpus)), 0) if gpus else None
    monkeypatch.setattr(tiny_shell_exec, "execute", lambda command, env=None: answer)
    monkeypatch.setattr(launch, "_check_all_hosts_ssh_successful", lambda *args, **kwargs: True)
    monkeypatch.setattr(launch, "_common_interfaces", lambda *args: [])
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", allotted)
    with mock.patch.object(launch, "gloo_run") as launched:
        launch._run(launch.parse_args([*options.split(), "--disable-cache", "python", "train.py"]))
    assert (launched.call_args.args[0].hosts, launched.call_args.args[0].num_proc) == expected


@pytest.mark.parametrize("expected", [KeyError, KeyboardInterrupt])
def test_processes_end_if_waiting_for_them_fails(expected):
    """The caller's function fails for one of the processes, or the user interrupts the job."""
    running, results = threading.Barrier(3), queue.SimpleQueue()

    def start(line, slot, events):
        running.wait(30)
        if slot.rank == 0 and expected is KeyError:
            raise KeyError("lost")
        if slot.rank == 0:
            # Python handles a signal that arrives as it begins to wait for a thread only when the thread ends. The
            # sleep avoids that.
            time.sleep(0.5)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        results.put(events[0].wait(8))
        return 143, time.time()

    # A shell that starts the tests in the background makes them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(expected):
            gloo_run.launch_gloo(["true"], start, settings.Settings(hosts="a:3", num_proc=3), ["lo"], {}, "127.0.0.1")
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(results.get(timeout=30) for _ in range(2))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), HorovodInternalError),
        (RuntimeError("CUDA driver error: device not ready"), HorovodInternalError),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), HorovodInternalError),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            HorovodInternalError,
        ),
        (RuntimeError("NCCL Error 2: unhandled system error"), HorovodInternalError),
        (
            RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            ),
            ValueError,
        ),
        (
            NotImplementedError("Could not run 'smd::all_reduce' with arguments from the 'SparseCUDA' backend"),
            ValueError,
        ),
        (RuntimeError("`a` of 3 elements, expected 2 as NCCL does [smd:invalid_argument]"), ValueError),
    ],
)
def test_framework_errors_are_device_failures_or_invalid_arguments(error, expected):
    """Elastic training returns to the last commit when a device failed, but not when an argument is invalid."""
    assert type(at_submission(error)) is expected


def test_commands_in_a_shell():
    out, err = io.StringIO(), io.StringIO()
    code = safe_shell_exec.execute("echo a; printf b >&2; printf 'c\\rd'; exit 3", stdout=out, stderr=err, index=4)
    assert code == 3
    assert out.getvalue() == "[4]<stdout>:a\n[4]<stdout>:c\r[4]<stdout>:d"
    assert err.getvalue() == "[4]<stderr>:b"
    assert safe_shell_exec.execute("kill -TERM $$") == 143
    event = threading.Event()
    threading.Timer(0.3, event.set).start()
    start = time.monotonic()
    assert safe_shell_exec.execute("sleep 60", events=[event]) == 143
    assert time.monotonic() - start < 30


class _SlowStream(io.StringIO):
    def write(self, text):
        time.sleep(0.01)
        return super().write(text)


def test_a_slow_reader_gets_all_output_of_a_command(monkeypatch):
    monkeypatch.setattr(safe_shell_exec, "GRACEFUL_TERMINATION_TIME_S", 0.5)
    out = _SlowStream()
    assert safe_shell_exec.execute("seq 100", stdout=out) == 0
    assert out.getvalue() == "".join(f"{number}\n" for number in range(1, 101))


def test_a_process_that_leaves_the_group_with_the_output_open_delays_nobody(monkeypatch):
    monkeypatch.setattr(safe_shell_exec, "GRACEFUL_TERMINATION_TIME_S", 0.5)
    out, start = io.StringIO(), time.monotonic()
    assert safe_shell_exec.execute("setsid sleep 45 & echo there; sleep 0.5", stdout=out) == 0
    assert out.getvalue() == "there\n"
    assert time.monotonic() - start < 30


def test_threads_and_pipes():
    assert threads.execute_function_multithreaded(lambda x: x + 1, [[1], [2]]) == {0: 2, 1: 3}
    event, seen = threading.Event(), []
    waiting = threads.on_event(event, seen.append, (1,))
    event.set()
    waiting.join(30)
    assert seen == [1]
    for call, text in (
        (lambda: threads.in_thread(print, [1]), "args must be a tuple, not"),
        (lambda: threads.on_event(None, print), "Event must not be None"),
        (lambda: threads.on_event(event, print, daemon=False), "Stop event must be given for non-daemon event thread"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    pipe = streams.Pipe()
    threads.in_thread(lambda: [pipe.write("abcdef"), pipe.close()])
    assert [pipe.read(4), pipe.read(), pipe.read()] == ["abcd", "ef", None]


def test_small_helpers(monkeypatch):
    assert codec.loads_base64(codec.dumps_base64({"a": 1})) == {"a": 1}
    key = secret.make_secret_key()
    assert secret.check_digest(key, b"x", secret.compute_digest(key, b"x"))
    assert not secret.check_digest(key, b"y", secret.compute_digest(key, b"x"))
    limit = timeout.Timeout(0, "{activity} took {timeout}")
    time.sleep(0.01)
    with pytest.raises(timeout.TimeoutException, match="waiting took 0"):
        limit.check_time_out_for("waiting")
    assert env.is_exportable("PATH")
    assert not env.is_exportable("BASH_FUNC_x")
    assert not env.is_exportable("OLDPWD")
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMI_", "RANK")):
            monkeypatch.delenv(name)
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(RuntimeError, match="Could not determine process rank and size"):
        env.get_env_rank_and_size()
    assert HostDiscoveryScript("printf 'a:2\\nb\\n'", 3).find_available_hosts_and_slots() == {"a": 2, "b": 3}
    monkeypatch.setattr(discovery, "_LONGEST_RUN_S", 0.2)
    with pytest.raises(RuntimeError, match=r"script sleep 60 took longer than 0\.2 s"):
        HostDiscoveryScript("sleep 60", 3).find_available_hosts_and_slots()
    assert FixedHosts({"a": 1}).find_available_hosts_and_slots() == {"a": 1}
    assert _HorovodArgs().num_proc == 1
    assert _HorovodArgs().hosts is None
