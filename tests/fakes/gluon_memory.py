"""Memory and barriers of the CPU stand-in for Gluon (tests/fakes/gluon.py)."""

from __future__ import annotations

import threading

import torch

PATIENCE_S = 20


class Barrier:
    """An mbarrier: a phase ends when all arrived and all announced bytes came."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count):
        self.count = self.pending = count

    def change(self, arrivals, num_bytes):
        with self.changed:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "more arrivals than the barrier expects"
            if self.pending == 0 and self.bytes == 0:
                self.pending = self.count
                self.phase ^= 1
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase != int(parity), PATIENCE_S)
            assert done, "a barrier was waited for in vain"


class Shared:
    """A piece of shared memory: a tensor, or barriers."""

    def __init__(self, data):
        self.data = data

    def index(self, i):
        return Shared(self.data[int(i)]) if isinstance(self.data, torch.Tensor) else self.data[i]

    def slice(self, start, length):
        return Shared(self.data[start : start + length])

    def permute(self, order):
        return Shared(self.data.permute(order))

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def load(self, layout):
        return self.data.clone()

    def store(self, value):
        self.data.copy_(value)

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(dtype).view(shape))


class Pointer:
    """An address, or a tensor of addresses, in one global tensor."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, more):
        return Pointer(self.memory, self.offset + more)

    def to(self, dtype):
        return self

    def flat(self):
        """The memory as one dimension; bytes where indexing does not know the type."""
        flat = self.memory.view(-1)
        return flat.view(torch.uint8) if flat.dtype == torch.float8_e4m3fn else flat


class Descriptor:
    """A global matrix loaded in boxes; what lies outside it reads as zero."""

    def __init__(self, matrix, box):
        self.matrix, self.box, self.layout = matrix, box, None

    def read(self, row, column):
        rows, columns = self.box
        made = torch.zeros(self.box, dtype=torch.float32)
        found = self.matrix[row : row + rows, column : column + columns].float()
        made[: found.shape[0], : found.shape[1]] = found
        return made


def one(bar):
    return bar.data[0] if isinstance(bar, Shared) else bar


def allocate(dtype, shape, layout):
    if layout == "barriers":
        return Shared([Barrier() for _ in range(shape[0])])
    fill = torch.nan if dtype.is_floating_point else 12345
    return Shared(torch.full(shape, fill, dtype=torch.float32).to(dtype))


def load(pointer, mask=None, other=0, cache_modifier=""):
    flat, offset = pointer.flat(), torch.as_tensor(pointer.offset)
    if mask is None:
        return flat[offset].clone()
    mask = torch.as_tensor(mask).expand(offset.shape)
    return torch.where(mask, flat[torch.where(mask, offset, 0)], torch.as_tensor(other))


def store(pointer, value, mask=None):
    flat, offset = pointer.flat(), torch.as_tensor(pointer.offset)
    value = torch.as_tensor(value)
    value = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
    if mask is None:
        flat[offset] = value.to(flat.dtype)
        return
    mask = mask.expand(offset.shape)
    flat[offset[mask]] = value[mask].to(flat.dtype)
