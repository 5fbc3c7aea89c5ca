"""Parts of Horovod's launcher: the store over HTTP, services, host discovery, and the driver of an elastic job."""

import http.client
import io
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from horovod.runner.common.service import compute_service, driver_service, task_service
from horovod.runner.common.util import codec, network, secret
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.common.util.timeout import Timeout, TimeoutException
from horovod.runner.elastic.discovery import FixedHosts, HostManager
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager, WorkerNotificationService
from horovod.runner.http import http_client, http_server
from horovod.runner.util import cache
from horovod.runner.util import network as interfaces
from support import hosts

KEY = secret.make_secret_key()


def test_the_store_requires_the_jobs_secret(monkeypatch):
    server = http_server.KVStoreServer(key=KEY)
    port = server.start_server()
    try:
        http_client.put_data_into_kvstore("127.0.0.1", port, "scope", "key/1", {"a": [1, 2]}, KEY)
        monkeypatch.setenv("_HOROVOD_SECRET_KEY", codec.dumps_base64(KEY))
        assert http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "key/1") == {"a": [1, 2]}
        with pytest.raises(RuntimeError, match="has no value scope/other"):
            http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "other")
        with pytest.raises(RuntimeError, match="does not know this job's secret"):
            http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "key/1", b"another")
        monkeypatch.delenv("_HOROVOD_SECRET_KEY")
        with pytest.raises(RuntimeError, match="needs the job's secret"):
            http_client.read_data_from_kvstore("127.0.0.1", port, "scope", "key/1")

        # A recorded request is of no use to an attacker: neither a replay nor another body or nonce with the same
        # digest is accepted.
        def status_of(body, headers):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("PUT", "/scope/x", body, headers)
            status = connection.getresponse().status
            connection.close()
            return status

        first, second = (http_server.headers_of_request(KEY, "PUT", "/scope/x", nonce, b"body") for nonce in "12")
        other = {**second, http_server.NONCE: "3"}
        found = [
            status_of(b"body", first),
            status_of(b"body", first),
            status_of(b"body", other),
            status_of(b"some", second),
            status_of(b"", {}),
        ]
        assert found == [200, 403, 403, 403, 403]
    finally:
        server.shutdown_server()


def test_the_rendezvous_assigns_slots_and_deletes_scopes_that_all_ranks_left():
    server = http_server.RendezvousServer(key=KEY)
    port = server.start()
    ask = lambda method, scope, key, body=b"": http_client.request(  # noqa: E731
        method, "127.0.0.1", port, scope, key, body, KEY
    )
    try:
        server.init(get_host_assignments(parse_hosts("a:2,b:1"), 3))
        assert ask("GET", "rank_and_size", "b:0") == b"2,3,0,1,1,2"
        ask("PUT", "cross0", "address", b"here")
        ask("DELETE", "cross0", "0")
        assert ask("GET", "cross0", "address") == b"here", "the scope must stay until rank 2 has left, too"
        ask("DELETE", "cross0", "2")
        with pytest.raises(RuntimeError, match="no value"):
            ask("GET", "cross0", "address")
    finally:
        server.stop()


class Adder(network.BasicService):
    def _handle(self, req, client_address):
        return sum(req) if isinstance(req, list) else super()._handle(req, client_address)


class FailsToUnpickle:
    """Raises when it is unpickled: on the service, since its client only pickles it."""

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise ValueError("not here")


def test_services_require_the_jobs_secret():
    service = Adder("adder", KEY)
    try:
        client = network.BasicClient("adder", service.addresses(), KEY, match_intf=True)
        assert client.addresses() == service.addresses()
        assert client._send([1, 2]) == 3
        with pytest.raises(RuntimeError, match="adder: TypeError: unsupported operand"):
            client._send([1, "a"])
        with pytest.raises(RuntimeError, match="does not support dict"):
            client._send({})
        with pytest.raises(RuntimeError, match="adder: ValueError: not here"):
            client._send(FailsToUnpickle())
        for name, key in (("adder", b"another"), ("another", KEY)):
            with pytest.raises(network.NoValidAddressesFound):
                network.BasicClient(name, service.addresses(), key, attempts=1, probe_timeout=5)
    finally:
        service.shutdown()


@pytest.mark.parametrize("kind", ["service", "store"])
def test_a_shutdown_waits_for_running_requests_only(kind):
    asked, answered = threading.Event(), []

    def slowly():
        asked.set()
        time.sleep(0.5)
        return b"done"

    class Slow(network.BasicService):
        def _handle(self, req, client_address):
            return slowly().decode() if req == "slow" else super()._handle(req, client_address)

    class SlowHandler(http_server.KVStoreHandler):
        def _get(self, scope, key):
            return http_server.OK, slowly()

    if kind == "service":
        service = Slow("slow", KEY)
        client, port = network.BasicClient("slow", service.addresses(), KEY), service.get_port()
        ask, stop = lambda: client._send("slow"), service.shutdown
    else:
        service = http_server.KVStoreServer(key=KEY)
        port = service.start_server(SlowHandler)
        ask, stop = (
            lambda: http_client.request("GET", "127.0.0.1", port, "a", "b", b"", KEY).decode(),
            service.shutdown_server,
        )
    with socket.create_connection(("127.0.0.1", port)) as idle:
        request = threading.Thread(target=lambda: answered.append(ask()))
        request.start()
        assert asked.wait(10)
        start = time.monotonic()
        stop()
        took = time.monotonic() - start
        request.join(10)
        assert answered == ["done"]
        assert 0.2 < took < 10, "a shutdown must wait for running requests, but not for idle connections"
        idle.settimeout(10)
        assert len(idle.recv(100)) in (0, 16)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask()


def test_a_service_asks_whether_the_hosts_of_its_clients_are_there():
    found = {}

    class Looks(network.BasicService):
        def _reply(self, connection, wire, message):
            peer = connection.connection
            found["keepalive"] = peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT"):
                found[name] = peer.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            super()._reply(connection, wire, message)

    service = Looks("looks", KEY)
    try:
        network.BasicClient("looks", service.addresses(), KEY)
    finally:
        service.shutdown()
    # A user timeout would also end the stream of a client that is alive and reads nothing for a while.
    assert found == {"keepalive": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 0}


def test_a_shutdown_ends_blocking_requests():
    service = compute_service.ComputeService(1, 1, KEY)
    client = compute_service.ComputeClient(service.addresses(), KEY)
    threading.Timer(0.3, service.shutdown).start()
    start = time.monotonic()
    with pytest.raises((OSError, EOFError)):
        client.wait_for_dispatcher_registration(0, 30)
    assert time.monotonic() - start < 10


def test_output_of_commands_is_streamed():
    command = "for i in 1 2 3; do echo out $i; echo err $i >&2; done"
    task = task_service.BasicTaskService("task", 5, KEY)
    try:
        client = task_service.BasicTaskClient("task", task.addresses(), KEY)
        out, err = io.StringIO(), io.StringIO()
        threads = client.stream_command_output(out, err)
        client.run_command(command, {}, capture_stdout=True, capture_stderr=True)
        client.wait_for_command_termination(delay=0.2)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert client.command_result() == (True, 0)
        for name, text in (("out", out), ("err", err)):
            assert text.getvalue() == "".join(f"[5]<std{name}>:{name} {i}\n" for i in (1, 2, 3))
        # Output that is not captured goes to the task's own standard output, and its stream ends.
        more = io.StringIO()
        client.run_command("true", {}, capture_stderr=True)
        threads = client.stream_command_output(stdout=more)
        assert threads[1] is None
        threads[0].join(10)
        assert (client.wait_for_command_exit_code(), more.getvalue()) == (0, "")
        # Output that is longer than the buffer of a pipe.
        client.run_command("yes äöü | head -c 300000", {}, capture_stdout=True)
        (thread, _), more = client.stream_command_output(more), more
        assert client.wait_for_command_exit_code() == 0
        thread.join(10)
        assert more.getvalue().count("[5]<stdout>:äöü\n") == 300_000 // 7
    finally:
        task.shutdown()


def test_addresses_of_this_host():
    found = interfaces.get_local_host_intfs()
    assert found["lo"] == "127.0.0.1"
    assert interfaces.get_local_intfs() == set(found)
    assert (interfaces.get_local_intfs("lo"), interfaces.get_local_intfs("none0")) == ({"lo"}, set())
    assert interfaces.get_local_host_addresses() == set(found.values())
    assert interfaces.get_driver_ip(["lo"]) == "127.0.0.1"
    with pytest.raises(RuntimeError, match="none of the interfaces"):
        interfaces.get_driver_ip(["none0"])
    assert interfaces.filter_local_addresses(["localhost", "192.0.2.1"]) == ["192.0.2.1"]


def test_results_of_checks_are_cached(tmp_path):
    calls = []

    @cache.use_cache()
    def check(name, port=None):
        calls.append(name)
        return name != "bad"

    kept = cache.Cache(str(tmp_path / "made"), 60, "a")
    assert [check(name, port=1, fn_cache=kept) for name in ("x", "x", "bad", "bad")] == [True, True, False, False]
    assert calls == ["x", "bad", "bad"], "a failed check must run again"
    check("x", port=1, fn_cache=cache.Cache(str(tmp_path / "made"), 60, "a"))
    assert len(calls) == 3
    check("x", port=2, fn_cache=kept)
    check("x", port=1)
    check("x", port=1, fn_cache=cache.Cache(str(tmp_path / "made"), 60, "b"))
    check("x", port=1, fn_cache=cache.Cache(str(tmp_path / "made"), 0, "a"))
    assert len(calls) == 7
    for text in ("[]", '{"parameters": "a"}', '{"parameters": "a", "values": {"": 0}}', "?"):
        (tmp_path / "made" / "cache.json").write_text(text)
        assert kept.get("") is None
    check("x", fn_cache=cache.Cache("/dev/null/none", 60, "a"))
    assert len(calls) == 8, "without a writable cache, the check must run"


def test_tasks_register_and_run_commands():
    driver = driver_service.BasicDriverService(2, "driver", KEY)
    task = task_service.BasicTaskService("task", 0, KEY, command_env={"A": "3"})
    try:
        client = driver_service.BasicDriverClient("driver", driver.addresses(), KEY)
        client.register_task(0, task.addresses(), "host")
        with pytest.raises(TimeoutError, match=r"tasks to start: \[1\] are missing"):
            driver.wait_for_initial_registration(0.1)
        client.register_task(1, {"lo": [("127.0.0.1", 1)]}, "host")
        driver.wait_for_initial_registration(Timeout(10, ""))
        assert driver.task_host_hash_indices() == {"host": [0, 1]}
        for index, names in enumerate((["lo", "eth0"], ["lo"])):
            client.register_task_to_task_addresses(index, {name: [("127.0.0.1", 1)] for name in names})
        driver.wait_for_task_to_task_address_updates(10)
        assert driver.get_common_interfaces() == {"lo"}

        worker = task_service.BasicTaskClient("task", client.all_task_addresses(0), KEY)
        worker.run_command("exit $((A + B))", {"B": "4"})
        task.wait_for_command_start(Timeout(10, ""))
        assert worker.wait_for_command_exit_code() == 7
        worker.run_command("sleep 60", {})
        with pytest.raises(RuntimeError, match="runs a command already"):
            worker.run_command("true", {})
        assert worker.command_result() == (False, None)
        worker.abort_command()
        assert worker.wait_for_command_exit_code() == 143
    finally:
        task.shutdown()
        driver.shutdown()


def test_workers_of_a_data_service_find_their_dispatcher():
    with pytest.raises(ValueError, match="must be larger than 0"):
        compute_service.ComputeService(1, 0, KEY)
    service = compute_service.ComputeService(2, 2, KEY)
    try:
        client = compute_service.ComputeClient(service.addresses(), KEY)
        threading.Timer(0.3, client.register_dispatcher, (1, "grpc://b:1")).start()
        assert client.wait_for_dispatcher_registration(1, 30) == "grpc://b:1"
        with pytest.raises(RuntimeError, match="already been registered under grpc://b:1"):
            client.register_dispatcher(1, "grpc://c:1")
        with pytest.raises(RuntimeError, match="there is no dispatcher 2"):
            client.register_dispatcher(2, "grpc://c:1")
        client.register_worker_for_dispatcher(1, 2)
        with pytest.raises(TimeoutError, match="workers of dispatcher 1"):
            client.wait_for_dispatcher_worker_registration(1, 0.1)
        client.register_worker_for_dispatcher(1, 3)
        client.wait_for_dispatcher_worker_registration(1, 30)
        threading.Timer(0.3, client.shutdown).start()
        client.wait_for_shutdown()
    finally:
        service.shutdown()


def test_hosts_are_ordered_by_age_and_blacklisted():
    discovery = FixedHosts({"b": 1, "c": 2})
    hosts = HostManager(discovery)
    assert hosts.update_available_hosts() == HostUpdateResult.added
    assert hosts.update_available_hosts() == HostUpdateResult.no_update
    discovery.set({"a": 1, "c": 3, "b": 1})
    assert hosts.update_available_hosts() == HostUpdateResult.added
    assert hosts.current_hosts.host_assignment_order == ["b", "c", "a"]
    assert hosts.current_hosts.count_available_slots() == 5
    discovery.set({"a": 2, "c": 3})
    assert hosts.update_available_hosts() == HostUpdateResult.mixed
    hosts.blacklist("c")
    assert hosts.is_blacklisted("c")
    assert hosts.current_hosts.available_hosts == {"a"}
    assert hosts.update_available_hosts() == HostUpdateResult.no_update, "it must stay on the blacklist"
    with pytest.raises(ValueError, match="1 to 3600"):
        HostManager(discovery, (5, 2))
    assert HostManager.order_available_hosts({"a": 1, "c": 3, "d": 1}, ["c", "b", "a"]) == ["c", "a", "d"]
    hosts = HostManager(discovery, (1, 2))
    hosts.update_available_hosts()
    hosts.blacklist("a")
    deadline = time.monotonic() + 30
    while hosts.is_blacklisted("a"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    hosts.update_available_hosts()
    assert hosts.current_hosts.host_assignment_order == ["c", "a"], "a host that returns must be the last in the order"


class Elastic:
    """An elastic job whose workers are threads. Each calls the rendezvous over HTTP and then runs `body`."""

    def __init__(self, slots, least, most=None, **options):
        self.discovery = FixedHosts(slots)
        self.server = http_server.RendezvousServer(key=KEY)
        self.driver = ElasticDriver(self.server, self.discovery, least, most, **{"timeout": 30, **options})
        self.port = self.server.start(create_rendezvous_handler(self.driver))
        self.seen = []

    def enter(self, host, slot):
        answer = http_client.request("GET", "127.0.0.1", self.port, "rank_and_size", f"{host}:{slot}", b"", KEY)
        place = SlotInfo.from_response_string(answer.decode())
        self.seen.append((f"{host}:{slot}", place.rank, place.size))
        return place

    def run(self, first, body):
        def work(slot, events):
            return body(slot.hostname, slot.local_rank, events), time.time()

        try:
            self.driver.start(first, work)
            results = self.driver.get_results()
        finally:
            self.driver.stop()
            self.server.stop()
        return results.error_message, {name: code for name, (code, _) in results.worker_results.items()}


def test_an_elastic_job_succeeds():
    job = Elastic({"a": 2, "b": 2}, 2, 3)
    assert job.run(3, lambda host, slot, events: min(job.enter(host, slot).rank, 0)) == (
        None,
        {"a[0]": 0, "a[1]": 0, "b[0]": 0},
    )
    assert sorted(job.seen) == [("a:0", 0, 3), ("a:1", 1, 3), ("b:0", 2, 3)]


def test_host_assignments_list_ranks_by_host():
    job = Elastic({"a": 2, "b": 1}, 3)
    found = []

    def body(host, slot, events):
        job.enter(host, slot)
        if host == "b":
            places = job.driver.host_assignments
            found.append({name: [place.rank for place in slots] for name, slots in places.items()})
        while not found:
            time.sleep(0.01)
        return 0

    assert job.run(3, body)[0] is None
    assert found == [{"a": [0, 1], "b": [2]}]


def test_a_failed_worker_blacklists_its_host():
    job = Elastic({"a": 1, "b": 2}, 1)

    def body(host, slot, events):
        job.enter(host, slot)
        if host == "b":
            if slot == 1:
                sys.exit(7)
            while not any(event.wait(0.02) for event in events):
                pass
            return 143
        while not job.driver.host_manager.is_blacklisted("b"):
            time.sleep(0.02)
        return 0 if job.enter(host, slot).size == 1 and job.driver.world_size() == 1 else 1

    assert job.run(3, body) == (None, {"a[0]": 0}), "results of the failed host must not count"
    assert job.seen[-1] == ("a:0", 0, 1)


def test_rank_0_is_notified_of_a_host_that_joins_the_next_session():
    job = Elastic({"a": 1}, 1)
    manager, heard = WorkerNotificationManager(), threading.Event()

    class Listener:
        def on_hosts_updated(self, timestamp, kinds):
            assert abs(time.time() - timestamp) < 60
            assert kinds == HostUpdateResult.added
            heard.set()

    manager.register_listener(Listener())
    service = WorkerNotificationService(KEY, None, manager)

    def body(host, slot, events):
        if host == "b":
            return 0 if job.enter(host, slot).rank == 1 else 1
        job.enter(host, slot)
        job.driver.register_worker_server(host, slot, service.addresses(), KEY)
        job.discovery.set({"a": 1, "b": 1})
        if not heard.wait(30):
            return 1
        return 0 if job.enter(host, slot).size == 2 else 1

    try:
        assert job.run(1, body) == (None, {"a[0]": 0, "b[0]": 0})
    finally:
        service.shutdown()
    assert [seen for seen in job.seen if seen[0] == "a:0"] == [("a:0", 0, 1), ("a:0", 0, 2)]


def test_failed_elastic_jobs_report_the_reason():
    def fail(host, slot, events):
        raise RuntimeError("no disk")

    error, codes = Elastic({"a": 1}, 1).run(1, fail)
    assert "workers have failed on all hosts" in error
    assert "no disk" in error
    assert codes == {"a[0]": 1}

    job = Elastic({"a": 1}, 1, reset_limit=1)

    def again(host, slot, events):
        while job.enter(host, slot).rank == 0:
            pass
        return 0

    error, _ = job.run(1, again)
    assert error == "number of resets during elastic job exceeded limit: 1"
    job = Elastic({"a": 1}, 2, timeout=0.3)
    with pytest.raises(TimeoutException, match="minimum number of slots to become available: there are 1 of 2"):
        job.run(2, fail)

    job = Elastic({"a": 1}, 1)

    def refuse_places(slots):
        raise OSError("no store")

    job.server.init = refuse_places
    error, _ = job.run(1, lambda host, slot, events: job.enter(host, slot).rank)
    assert error == "the driver of the job failed: OSError('no store')"

    class Broken:
        def find_available_hosts_and_slots(self):
            raise OSError("no such script")

    job = Elastic({}, 1)
    job.driver.stop()
    driver = ElasticDriver(job.server, Broken(), 1, None)
    assert driver.get_results().error_message == "the discovery of hosts failed: no such script"
    with pytest.raises(RuntimeError, match="no such script"):
        driver.start(1, fail)


@pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_read_ends_when_the_peers_host_is_cut_off(is_idle):
    """Also while sent data is not acknowledged, when the system sends no keepalive probes."""
    server = "import socket, sys; socket.create_server((sys.argv[1], 7000)).accept()[0].recv(2); sys.stdin.read()"
    client = """
        import socket, sys
        from horovod.runner.util import peers
        peers._KEEPALIVE_S = 1
        with socket.create_connection((sys.argv[1], 7000), 20) as peer:
            peer.settimeout(None)
            peers.notice_lost_hosts(peer)
            print("connected", flush=True)
            sys.stdin.readline()
            if sys.argv[2] == "False":
                peer.sendall(b"x")
            peer.recv(1)
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with hosts.Hosts(2) as two:
        address = hosts.address(1)
        listening = subprocess.Popen([*two.on(1), sys.executable, "-c", server, address], **pipes)
        program = [sys.executable, "-c", textwrap.dedent(client), address, str(is_idle)]
        try:
            reading = _connected([*two.on(0), *program], pipes)
            two.cut(1)
            _, errors = reading.communicate("\n", timeout=30)
        finally:
            for each in (listening, reading):
                each.kill()
                each.communicate()
    assert "TimeoutError" in errors or "No route to host" in errors, errors


@pytest.mark.skipif(hosts.missing_network() is not None, reason=str(hosts.missing_network()))
def test_a_stream_ends_when_the_clients_host_is_cut_off():
    """The command whose output is streamed would otherwise wait for a reader."""
    server = """
        import sys, time
        from horovod.runner.common.util import network
        from horovod.runner.util import peers, streams
        peers._KEEPALIVE_S = 1
        class Texts(network.BasicService):
            def _handle(self, req, client_address):
                text = streams.Pipe()
                pipes.append(text)
                return (network.AckStreamResponse(), text) if req == "text" else super()._handle(req, client_address)
        pipes = []
        service = Texts("texts", b"key")
        print(service.get_port(), flush=True)
        sys.stdin.readline()
        time.sleep(6)
        for _ in range(64):
            pipes[-1].write("x" * (1 << 20))
        print("written", flush=True)
    """
    client = """
        import sys
        from horovod.runner.common.util import network
        client = network.BasicClient("texts", {"eth0": [(sys.argv[1], int(sys.argv[2]))]}, b"key")
        print("connected", flush=True)
        client._send("text", sys.stderr)
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with hosts.Hosts(2) as two:
        run = lambda host, text, *words: [*two.on(host), sys.executable, "-c", textwrap.dedent(text), *words]  # noqa: E731
        serving = subprocess.Popen(run(0, server), **pipes)
        try:
            reading = _connected(run(1, client, hosts.address(0), serving.stdout.readline().strip()), pipes)
            time.sleep(1)
            two.cut(1)
            output, errors = serving.communicate("\n", timeout=40)
        finally:
            for each in (serving, reading):
                each.kill()
                each.communicate()
    assert output == "written\n", errors


def _connected(command, pipes):
    """Starts a program again until it has connected, because the server may not listen yet."""
    for _ in range(50):
        program = subprocess.Popen(command, **pipes)
        if program.stdout.readline() == "connected\n":
            return program
        _, errors = program.communicate()
        time.sleep(0.2)
    raise AssertionError(errors)
