"""A CPU stand-in for what the fused expert chain uses of Gluon: enough to run its program.

Kernel sources are executed as plain Python: every partition of every program is a thread,
barriers block, bulk copies are done by a thread of their own, late and in any order. It says
whether indices, masks, barrier phases and counters are right and whether the program can hang;
nothing about layouts, memory ordering or speed.
"""

from __future__ import annotations

import ast
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from epdecode.kernels.fp8 import group_scales
from epdecode.kernels.quant_math import silu_mul_ref
from tests.fakes.gluon_memory import PATIENCE_S, Shared, allocate, load, one, store

KERNELS = Path(__file__).parent.parent.parent / "epdecode" / "kernels"


class Machine:
    """One launch: the grid's shared state and each thread's own program id."""

    def __init__(self, programs, seed):
        self.programs, self.local = programs, threading.local()
        self.atomics = threading.Lock()
        self.random = random.Random(seed)
        self.failures = []

    def gl(self):
        """What the kernels know as ``gl``."""
        return SimpleNamespace(
            constexpr=lambda value: value, static_range=range, shared_memory_descriptor=Shared,
            int32=torch.int32, int64=torch.int64, uint64=torch.int64, float32=torch.float32,
            bfloat16=torch.bfloat16, float8e4nv=torch.float8_e4m3fn,
            BlockedLayout=_layout, SliceLayout=_layout, SwizzledSharedLayout=_layout,
            NVMMADistributedLayout=_layout, num_warps=lambda: 4,
            arange=lambda start, end, layout: torch.arange(start, end),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, int(value), dtype=dtype),
            zeros_like=torch.zeros_like,
            where=_where, maximum=_maximum, minimum=_minimum, abs=torch.abs,
            max=lambda x, axis: x.amax(axis), min=lambda x, axis: x.amin(axis),
            sum=lambda x, axis: x.sum(axis),
            associative_scan=lambda x, axis, combine: x.cumsum(axis),
            convert_layout=lambda x, layout: x, thread_barrier=lambda: None,
            load=load, store=store, atomic_add=self.atomic_add,
            inline_asm_elementwise=self.assembly, split=lambda x: x.unbind(-1),
            allocate_shared_memory=allocate,
            program_id=lambda axis: torch.tensor(self.local.program),
            num_programs=lambda axis: torch.tensor(self.programs),
            warp_specialize=self.specialize,
        )  # fmt: skip

    def names(self):
        """Every name that the kernels import."""
        arrive = SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=lambda bar, count: one(bar).init(count),
            wait=lambda bar, phase: one(bar).wait(phase),
            arrive=lambda bar, count: one(bar).change(count, 0),
            expect=lambda bar, num_bytes, pred=True: pred and bar.change(1, num_bytes),
        )  # fmt: skip
        return {
            "gl": self.gl(), "mbarrier": arrive, "aggregate": lambda cls: cls,
            "gluon": SimpleNamespace(jit=lambda fn: fn, constexpr_function=lambda fn: fn),
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "tl": SimpleNamespace(
                tensor=torch.Tensor, PropagateNan=SimpleNamespace(ALL=1),
                clamp=lambda x, low, high, propagate_nan: x.clamp(low, high),
            ),
            "warpgroup_mma": _multiply,
            "warpgroup_mma_wait": lambda left, deps: deps[0] if len(deps) == 1 else deps,
            "silu_mul": silu_mul_ref, "group_scale": lambda x, packed: group_scales(x, "fp32"),
            "scalar": torch.tensor,
        }  # fmt: skip

    def assembly(self, asm, constraints, arguments, dtype, is_pure, pack):
        if "%smid" in asm:
            return torch.tensor(self.local.program)
        return load(arguments[0]) if "ld.acquire" in asm else torch.tensor(0)

    def atomic_add(self, pointer, value, sem, mask=True):
        if not mask:
            return torch.tensor(0)
        with self.atomics:
            old = load(pointer)
            store(pointer, old + value)
            return old

    def copy(self, descriptor, at, barrier, target):
        """A bulk copy: some time later, in its own thread."""
        row, column = (int(x) for x in at)

        def move():
            box = descriptor.read(row, column)
            target.data.copy_(box.to(target.data.dtype))
            barrier.change(0, -box.numel() * target.data.element_size())

        threading.Timer(self.random.random() * 2e-3, move).start()

    def specialize(self, partitions, warps, registers):
        program = self.local.program
        threads = [
            threading.Thread(target=self.guard, args=(program, function, arguments))
            for function, arguments in partitions
        ]
        _run_all(threads)

    def guard(self, program, function, arguments):
        """Run one partition as ``program``; keep what it raises."""
        self.local.program = program
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001, raised again by launch
            self.failures.append(error)

    def launch(self, kernel, *arguments):
        """Run ``kernel`` once per program, all at the same time."""
        threads = [
            threading.Thread(target=self.guard, args=(program, kernel, arguments))
            for program in range(self.programs)
        ]
        _run_all(threads)
        if self.failures:
            raise self.failures[0]


def load_kernels(machine, *files):
    """The functions and classes of kernel files, in one namespace over the stand-in's names."""
    names = machine.names()
    for file in files:
        tree = _Values().visit(ast.parse((KERNELS / file).read_text()))
        keep = [node for node in tree.body if _is_kernel(node)]
        code = compile(ast.fix_missing_locations(ast.Module(keep, [])), file, "exec")
        exec(code, names)
    return SimpleNamespace(**names)


class _Values(ast.NodeTransformer):
    """What Python does otherwise than the compiler: numbers are tensors, tensors never change."""

    def visit_AugAssign(self, node):
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.Assign([node.target], value)

    def visit_Assign(self, node):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
            node.value = ast.Call(ast.Name("scalar", ast.Load()), [node.value], [])
        return node


def _is_kernel(node):
    marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
    return any(mark in ("gluon.jit", "aggregate") for mark in marks)


def _run_all(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE_S)
        assert not thread.is_alive(), "a partition never ended"


def _layout(*_):
    return None


def _where(condition, yes, no):
    return torch.where(torch.as_tensor(condition), torch.as_tensor(yes), torch.as_tensor(no))


def _maximum(a, b):
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def _minimum(a, b):
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def _multiply(a, b, acc, use_acc, is_async):
    return a.data.float() @ b.data.float()
