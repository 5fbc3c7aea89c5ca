"""The kernel of chunked all-reduces between two GPUs, alone and beside matrix products, with several grids and codes.

    python benches/gpu/chunks.py [--mebibytes 32]

One process drives both GPUs and launches the kernel of `rust-core/src/device/kernels/chunks.cu` itself, so that it can
vary parameters that the library fixes. Shown for 100 MiB of random float32 values, of float32 values that fit bfloat16,
and of bfloat16 values: microseconds alone, also of NCCL's all-reduce, and the time that each of several exchanges adds
to matrix products that run at the same time: to the products themselves, and until both have ended. The number of
exchanges is in parentheses.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

KERNELS = Path(__file__).resolve().parents[2] / "rust-core/src/device/kernels"
CHUNK_BYTES = 128 << 10
SLOT_BYTES = CHUNK_BYTES + 256
SLOTS, MAX_BLOCKS, MAX_RANKS, MAX_TENSORS = 4, 128, 16, 120
HEADER_BYTES = MAX_BLOCKS * (MAX_RANKS + 1) * 8 + 256

PEERS = np.dtype([("arenas", "u8", MAX_RANKS), ("control", "u8"), ("half", "u8"), ("me", "u4"), ("fingerprint", "u4")])
TENSOR = np.dtype([("sent", "u8"), ("input", "u8"), ("output", "u8"), ("elems", "u8")])
CHUNKS = np.dtype(
    [("peers", PEERS), ("slots", "u8"), ("rounds", "u4"), ("count", "u4"), ("tensors", TENSOR, MAX_TENSORS)]
)

#: Changes of the kernel's source. Unchanged, 8 warps send and 16 reduce, and numbers of 16 bits are added in pairs.
CODES = {
    "unchanged": {},
    "float32": {"Packed<TYPE>::EXISTS": "false"},
    "8 folders": {"#define FOLDERS 16": "#define FOLDERS 8", "FOLD_UNROLL = 2": "FOLD_UNROLL = 4"},
}
CHANNELS = (8, 16, 24, 32, 48, 64, 96, 128)

cuda = ctypes.CDLL("libcuda.so.1")


def check(status: int, allowed: int = 0) -> None:
    """Raises unless CUDA's driver or NVRTC returned success."""
    if status not in (0, allowed):
        raise RuntimeError(f"CUDA's driver or NVRTC returned error {status}")


def compile_kernel(kernels: Path, changes: dict[str, str], kind: str, op: str) -> bytes:
    """Compiles the kernel of a folder for Hopper and a type of number.cuh, with changes of its source."""
    folders = [Path(each) / "nvidia/cu13/lib" for each in sys.path] + [Path("/usr/local/cuda/lib64")]
    library = next(path for folder in folders for path in folder.glob("libnvrtc.so.1?"))
    for part in library.parent.glob("libnvrtc-builtins.so.1?.?"):
        ctypes.CDLL(str(part))
    nvrtc = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    text = (kernels / "chunks.cu").read_text()
    for before, after in changes.items():
        if before not in text:
            raise ValueError(f"chunks.cu has no `{before}`")
        text = text.replace(before, after)
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"chunks.cu", 0, None, None))
    options = ["--gpu-architecture=sm_90", "-std=c++17", f"-I{kernels}", f"-DTYPE={kind}", f"-DOP={op}", "-DRANKS=2"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))))
    check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    image = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetCUBIN(program, image))
    return image.raw


class Exchange:
    """Launches the kernel on both GPUs."""

    def __init__(self, kernels: Path, changes: dict[str, str], kind: str, op: str) -> None:
        image = compile_kernel(kernels, changes, kind, op)
        self.arenas, self.kernels, self.streams = [], [], []
        self.control = torch.zeros(64, dtype=torch.uint8).pin_memory()
        for device in range(2):
            with torch.cuda.device(device):
                size = HEADER_BYTES + MAX_BLOCKS * SLOTS * SLOT_BYTES
                self.arenas.append(torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}"))
                self.streams.append(torch.cuda.Stream(device, priority=-1))
                module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
                check(cuda.cuModuleLoadData(ctypes.byref(module), image))
                check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"exchange_chunks"))
                self.kernels.append(kernel)
        # Of a block, by the kernel's launch bounds.
        threads, max_threads_per_block = ctypes.c_int(), 0
        check(cuda.cuFuncGetAttribute(ctypes.byref(threads), max_threads_per_block, self.kernels[0]))
        self.threads = threads.value

    def __call__(self, tensors: list[torch.Tensor], channels: int) -> None:
        for device, tensor in enumerate(tensors):
            argument = np.zeros((), CHUNKS)
            argument["peers"]["arenas"][:2] = [arena.data_ptr() for arena in self.arenas]
            argument["peers"]["control"] = self.control.data_ptr()
            argument["peers"]["me"], argument["peers"]["fingerprint"] = device, 7
            argument["slots"] = HEADER_BYTES
            chunks = -(-tensor.nbytes // CHUNK_BYTES)
            argument["rounds"] = -(-chunks // channels)
            argument["count"] = 1
            argument["tensors"][0] = (*[tensor.data_ptr()] * 3, tensor.numel())
            arguments = (ctypes.c_void_p * 1)(argument.ctypes.data)
            stream = ctypes.c_void_p(self.streams[device].cuda_stream)
            with torch.cuda.device(device):
                check(
                    cuda.cuLaunchKernel(
                        self.kernels[device], channels, 1, 1, self.threads, 1, 1, 0, stream, arguments, None
                    )
                )


def synchronize() -> None:
    for device in range(2):
        torch.cuda.synchronize(device)


class Nccl:
    """NCCL's all-reduce, which chooses its number of channels itself."""

    def __init__(self, op: str) -> None:
        # NCCL's numbers of its operations.
        self.op = {"Sum": 0, "Average": 4}[op]
        self.streams = [torch.cuda.Stream(device, priority=-1) for device in range(2)]

    def __call__(self, tensors: list[torch.Tensor], channels: int) -> None:
        torch.cuda.nccl.all_reduce(tensors, op=self.op, streams=self.streams)


def timed(exchange: Callable[..., None], tensors: list[torch.Tensor], channels: int, count: int = 8) -> float:
    """Returns the microseconds of an exchange."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        exchange(tensors, channels)
    synchronize()
    return (time.perf_counter() - start) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=100, help="size of the tensors")
    parser.add_argument("--channels", type=int, nargs="+", default=CHANNELS, help="numbers of blocks")
    parser.add_argument("--codes", nargs="+", default=CODES, choices=CODES, help="variants of the kernel")
    parser.add_argument("--kernels", type=Path, default=KERNELS, help="folder of the sources, as of another version")
    parser.add_argument("--op", default="Sum", choices=["Sum", "Average"], help="the reduction")
    arguments = parser.parse_args()
    elems = arguments.mebibytes << 18
    contexts = []
    for device in range(2):
        with torch.cuda.device(device):
            torch.zeros(1, device=f"cuda:{device}")
            contexts.append(ctypes.c_void_p())
            check(cuda.cuCtxGetCurrent(ctypes.byref(contexts[-1])))
    already_enabled = 704
    for device in range(2):
        with torch.cuda.device(device):
            torch.zeros(1, device=f"cuda:{device}")
            check(cuda.cuCtxEnablePeerAccess(contexts[1 - device], 0), already_enabled)
    values = {
        "all bits": torch.randn(elems),
        "fits bf16": torch.randn(elems).bfloat16().float(),
        "bfloat16": torch.randn(2 * elems).bfloat16(),
    }
    # The feed-forward products of the 1.5B model at batch 2, and products that fill the device for longer.
    graphs = {}
    for rows, inner, columns, count in ((2048, 1600, 6400, 400), (8192, 8192, 8192, 16)):
        captured = []
        for device in range(2):
            a = torch.randn(rows, inner, device=f"cuda:{device}", dtype=torch.bfloat16)
            b = torch.randn(inner, columns, device=f"cuda:{device}", dtype=torch.bfloat16)
            out = torch.empty(rows, columns, device=f"cuda:{device}", dtype=torch.bfloat16)
            with torch.cuda.device(device):
                torch.mm(a, b, out=out)
                synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                    for _ in range(count):
                        torch.mm(a, b, out=out)
            captured.append((graph, torch.cuda.Stream(device), a, b, out))
        graphs[f"{rows} x {inner} x {columns}"] = captured

    def products(captured: list[tuple]) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Queues the products on both devices; returns their start and end events."""
        events = []
        for device, (graph, stream, *_) in enumerate(captured):
            with torch.cuda.device(device), torch.cuda.stream(stream):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                events.append((start, end))
        return events

    def duration(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        """Returns the milliseconds of the products on the slower device."""
        return max(start.elapsed_time(end) for start, end in events)

    alone = {}
    for name, captured in graphs.items():
        found = []
        for _ in range(5):
            events = products(captured)
            synchronize()
            found.append(duration(events))
        alone[name] = statistics.median(found)
    print("products alone, ms:", {name: round(value, 2) for name, value in alone.items()}, flush=True)
    print(f"{'code':14}{'values':10}{'channels':>9}{'alone us':>10}" + "".join(f"{name:>22}" for name in graphs))
    for code in ("NCCL", *arguments.codes):
        for kind, value in values.items():
            if code == "NCCL":
                exchange: Callable[..., None] = Nccl(arguments.op)
            else:
                exchange = Exchange(
                    arguments.kernels, CODES[code], "bf16" if value.dtype == torch.bfloat16 else "f32", arguments.op
                )
            fresh = [value.to(f"cuda:{device}") for device in range(2)]
            tensors = [tensor * (device + 1) for device, tensor in enumerate(fresh)]
            reduced = (value + 2 * value).double() / (2 if arguments.op == "Average" else 1)
            exchange(tensors, 32)
            synchronize()
            assert all(torch.equal(tensor.cpu(), reduced.to(value.dtype)) for tensor in tensors), (code, kind)
            for channels in [0] if code == "NCCL" else arguments.channels:
                # Both devices have the same values, so sums only double them: values that fit bfloat16 still do.
                tensors = [tensor.clone() for tensor in fresh]
                exchange(tensors, channels)
                least = min(timed(exchange, tensors, channels) for _ in range(3))
                row = []
                for name, captured in graphs.items():
                    # The number of exchanges that end before the products do.
                    count = min(100, max(1, int(alone[name] * 1e3 * 0.5 / least)))
                    longer, both = [], []
                    for _ in range(3):
                        tensors = [tensor.clone() for tensor in fresh]
                        synchronize()
                        events = products(captured)
                        for _ in range(count):
                            exchange(tensors, channels)
                        ends = []
                        for device, stream in enumerate(exchange.streams):
                            with torch.cuda.device(device):
                                ends.append(stream.record_event(torch.cuda.Event(enable_timing=True)))
                        synchronize()
                        longer.append((duration(events) - alone[name]) * 1e3 / count)
                        last = duration([(start, end) for (start, _), end in zip(events, ends, strict=True)])
                        both.append((max(last, duration(events)) - alone[name]) * 1e3 / count)
                    row.append(f"{statistics.median(longer):9.0f} {statistics.median(both):6.0f} ({count:3})")
                print(
                    f"{code:14}{kind:10}{channels or '':9}{least:10.0f}" + "".join(f"{cell:>22}" for cell in row),
                    flush=True,
                )


if __name__ == "__main__":
    main()
