"""Lower bound for the time that an all-reduce of gradients by copy engines adds to a training step.

It copies and sums as many bytes as such an all-reduce, at the same times, but does not wait for other ranks. The
received data are not used.
"""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as c10d

BUCKET_BYTES = 100 << 20


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class Copies:
    """A model whose gradients are copied in this way.

    Args:
        model: The model; calls are passed through.
        staged: Whether results arrive in staging memory and are moved to the gradients by a kernel.
    """

    def __init__(self, model: torch.nn.Module, staged: bool) -> None:
        self.model, self.staged = model, staged
        self.rank, self.size = c10d.get_rank(), c10d.get_world_size()
        self.stream = torch.cuda.Stream(priority=-1)
        elems = BUCKET_BYTES // 4
        self.source, self.target, self.folded = (torch.zeros(elems, device="cuda") for _ in range(3))
        # Parts to be summed; one row for each rank, as in the memory that peers write to.
        self.pieces = torch.zeros(self.size, elems // self.size, device="cuda")
        self.place_bytes = elems // self.size * 4
        self.runtime = ctypes.CDLL("libcudart.so." + torch.version.cuda.partition(".")[0])
        self._copy = self.runtime.cudaMemcpyAsync
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.own = ctypes.c_void_p()
        self._check(self.runtime.cudaMalloc(ctypes.byref(self.own), ctypes.c_size_t(2 * self.size * self.place_bytes)))
        handle, shared = _Handle(), [b""] * self.size
        self._check(self.runtime.cudaIpcGetMemHandle(ctypes.byref(handle), self.own))
        c10d.all_gather_object(shared, bytes(handle))
        self.peers = [ctypes.c_void_p() for _ in range(self.size)]
        for rank, peer in enumerate(self.peers):
            if rank != self.rank:
                handle = _Handle.from_buffer_copy(shared[rank])
                self._check(self.runtime.cudaIpcOpenMemHandle(ctypes.byref(peer), handle, 1))
        self.bytes, self.started = 0, False
        self.hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in model.parameters()]

    def __call__(self, *arguments):
        return self.model(*arguments)

    def close(self) -> None:
        """Removes the hooks and frees the memory."""
        for hook in self.hooks:
            hook.remove()
        torch.cuda.synchronize()
        c10d.barrier()
        for rank, peer in enumerate(self.peers):
            if rank != self.rank:
                self._check(self.runtime.cudaIpcCloseMemHandle(peer))
        torch.cuda.synchronize()
        c10d.barrier()
        self._check(self.runtime.cudaFree(self.own))

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self.started:
            self.started = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.bytes += parameter.grad.nbytes
        if self.bytes >= BUCKET_BYTES:
            self._exchange()

    def _finish(self) -> None:
        self._exchange()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.started = False

    def _exchange(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        while self.bytes > 0:
            part = min(self.bytes, BUCKET_BYTES) // 4 // self.size
            self.bytes -= min(self.bytes, BUCKET_BYTES)
            self._push(0, self.source, part)
            with torch.cuda.stream(self.stream):
                torch.sum(self.pieces[:, :part], 0, out=self.folded[:part])
            self._push(1, self.folded, part)
            if self.staged:
                with torch.cuda.stream(self.stream):
                    moved = (self.size - 1) * part
                    torch.add(self.source[:moved], 0, out=self.target[:moved])

    def _push(self, which: int, source: torch.Tensor, part: int) -> None:
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            place = self.peers[peer].value + (which * self.size + self.rank) * self.place_bytes
            begin = source.data_ptr() + (4 * part * peer if which == 0 else 0)
            self._check(self._copy(place, begin, 4 * part, 4, self.stream.cuda_stream))

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"CUDA's runtime returned error {status}")
