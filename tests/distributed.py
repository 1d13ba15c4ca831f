"""Distributed tests as one function: `run_distributed(fn, world_size, *args)`.

Workers are real processes on gloo, started once and shared by all tests. Each call gets a fresh
process group, so that no test inherits groups or unfinished collectives of another.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# Forked from one process that has imported what takes seconds, so that a new worker takes none.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.worker_imports"])
_workers: list[_Worker] = []


# Gloo threads of groups that something still holds; each polls, so a few hundred slow every test down.
MAX_THREADS = 64


def _let_go_of_groups() -> None:
    """ZeRO-3 engines outlive their destruction: whatever they are made of forgets its groups."""
    for owner in gc.get_objects():
        ours = str(type(owner).__module__).startswith(("cpmoe.", "deepspeed.", "torch.nn."))
        held = getattr(owner, "__dict__", {}) if ours else {}
        for name in [name for name, value in held.items() if isinstance(value, dist.ProcessGroup)]:
            held[name] = None


def _leave_group() -> bool:
    """Ends the job's process group; returns whether this process can take another job."""
    reusable = True
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and deepspeed.comm.is_initialized():
        for engine in [o for o in gc.get_objects() if issubclass(type(o), deepspeed.DeepSpeedEngine)]:
            # Its hooks on gradients make a cycle that no garbage collection finds.
            engine.destroy()
        _let_go_of_groups()
        zero3 = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
        if zero3 is not None:
            # ZeRO-3 numbers modules over the life of a process and wants the same numbers on all ranks.
            reusable = not zero3.FWD_MODULE_STACK
            zero3.FWD_MODULE_STACK.clear()  # keeps the last model of ZeRO-3, and so its groups
        # Also clears the groups that DeepSpeed keeps in module globals.
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()
    gc.collect()
    return reusable and len(os.listdir("/proc/self/task")) <= MAX_THREADS


def _serve(rank: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        fn, world_size, store_path, timeout, args = job
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store_path, world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout),
            )
            torch.manual_seed(1234 + rank)
            result = fn(rank, world_size, *args)
            dist.barrier()
            retires = not _leave_group()
            # Whole, not as handles that the parent asks this worker for: it may be gone by then.
            connection.send_bytes(pickle.dumps((True, result, retires)))
            if retires:
                return
        except BaseException:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc(), True)))
            # The state of the group is unknown after a failure: this worker ends and a new one is started.
            os._exit(1)


class _Worker:
    def __init__(self, rank: int) -> None:
        self.connection, child = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(rank, child), daemon=True)
        self.process.start()
        child.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _stop_all() -> None:
    while _workers:
        _workers.pop().stop()


atexit.register(_stop_all)


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Runs `fn(rank, world_size, *args)` on `world_size` gloo processes.

    `fn` is a module-level function; `args` and what it returns are pickled. Returns the results in
    rank order. Raises AssertionError with the traceback of every rank that failed or hung.
    """
    while len(_workers) < world_size:
        _workers.append(_Worker(len(_workers)))
    with tempfile.TemporaryDirectory(prefix="cpmoe-test-") as folder:
        job = (fn, world_size, os.path.join(folder, "store"), timeout, args)
        for worker in _workers[:world_size]:
            worker.connection.send(job)
        results, failures = [], []
        for rank, worker in enumerate(_workers[:world_size]):
            ok, value, retires = False, f"no answer within {timeout} s", True
            try:
                # The first job also pays for the worker's imports.
                if worker.connection.poll(timeout + 60 if not failures else 5):
                    ok, value, retires = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                value = "the process died"
            results.append(value)
            if retires:
                worker.stop()
                _workers[rank] = _Worker(rank)
            if not ok:
                failures.append(f"rank {rank} of {world_size}:\n{value}")
    if failures:
        _stop_all()
        raise AssertionError("\n".join(failures))
    return results
