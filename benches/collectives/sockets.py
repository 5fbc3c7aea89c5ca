"""One rank of the comparison between hosts: the bytes of an all-reduce that cross the link, through plain sockets.

    sockets.py HOSTS ADDRESS CASE...

`ADDRESS` is any address of the network between the hosts. Nothing is reduced, framed or authenticated. One thread sends
and receives without blocking, and limits no bytes in flight, so an all-reduce that limits them can be faster. Each
process exchanges with the process of its position on the next host, in both halves (reduce-scatter and all-gather),
what one of `n` processes of each of `h` hosts has to: `(h - 1) / h / n` of the tensor.
"""

import select
import socket
import sys
import time

import torch
import torch.distributed as dist


def connect(per_host: int, network: str) -> tuple[socket.socket, socket.socket]:
    """Returns the connection to this process's neighbour on the next host, and the one from the previous host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent; this finds the address that other hosts see.
        probe.connect((network, 9))
        own = probe.getsockname()[0]
    with socket.create_server((own, 0)) as server:
        addresses: list = [None] * size
        dist.all_gather_object(addresses, server.getsockname())
        onward = socket.create_connection(addresses[(rank + per_host) % size])
        inward, _ = server.accept()
    for connection in (onward, inward):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return onward, inward


def exchange(onward: socket.socket, inward: socket.socket, data: memoryview, received: memoryview) -> None:
    sent = got = 0
    while sent < len(data) or got < len(received):
        moved = False
        if sent < len(data):
            try:
                sent += onward.send(data[sent:])
                moved = True
            except BlockingIOError:
                pass
        if got < len(received):
            try:
                got += inward.recv_into(received[got:])
                moved = True
            except BlockingIOError:
                pass
        if not moved:
            select.select([inward] if got < len(received) else [], [onward] if sent < len(data) else [], [])


def main() -> None:
    hosts = int(sys.argv[1])
    dist.init_process_group("gloo")
    per_host = dist.get_world_size() // hosts
    onward, inward = connect(per_host, sys.argv[2])
    for argument in sys.argv[3:]:
        _, bytes_, repeats, calls = argument.split(":")
        length = int(bytes_) * (hosts - 1) // hosts // per_host
        data, received = (memoryview(bytearray(length)) for _ in range(2))
        times = []
        for repeat in range(int(repeats) + 1):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(int(calls)):
                exchange(onward, inward, data, received)
                exchange(onward, inward, data, received)
            if repeat > 0:
                times.append((time.perf_counter() - start) / int(calls))
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print("all_reduce", bytes_, *(f"{value:.9f}" for value in slowest.tolist()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
