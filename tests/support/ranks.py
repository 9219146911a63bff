"""Ranks for tests: processes joined by gloo, started once per world size and reused for the whole session.

    def check_sum(rank, world_size, mesh, start):          # module level: it travels by name
        x = torch.tensor([start + rank])
        dist.all_reduce(x)
        return x

    def test_sum():
        assert run_ranks(3, check_sum, 10) == [torch.tensor([33])] * 3

`run_ranks` is all that a test needs. Importing torch takes seconds, a call on a running pool milliseconds.

Every rank is an interpreter of its own (spawn, not fork), as under torchrun: other hash seeds, other addresses. A pool
that has seen a failure or a hang is killed, and the next call starts a new one, so a broken test cannot harm the next.

    parent (pytest)                         rank r
      TCPStore server, any free port  <----   init_process_group("gloo")
      fn, args                         ---->  fn(rank, world_size, mesh, *args)
      value or traceback               <----  pickled before the closing barrier: shows who finished
      ready                            <----  gc.collect(); barrier()
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

START_TIMEOUT = 120.0
CALL_TIMEOUT = 60.0
COLLECTIVE_TIMEOUT = 20.0
# A pool whose ranks all sleep this long is in a deadlock. gloo waits without spinning, its threads use 0.5 % of a core.
IDLE_TIMEOUT = 5.0
IDLE_CPU_SHARE = 0.03
# After the first failure the other ranks get this long to report theirs.
FAILURE_GRACE = 1.0
# gloo groups hold threads and sockets until they are destroyed; a pool with this many left over is replaced.
MAX_PROCESS_GROUPS = 64

_pools: dict[int, _RankPool] = {}


class RankFailure(Exception):
    """A call failed: `errors` maps rank to traceback, `stuck` lists the ranks that never returned."""

    def __init__(self, message: str, errors: dict[int, str], stuck: Sequence[int]) -> None:
        super().__init__(message)
        self.errors = errors
        self.stuck = list(stuck)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT) -> list[Any]:
    """Call `fn(rank, world_size, mesh, *args)` on every rank of a gloo group and return the results in rank order.

    Args:
        world_size: number of ranks; the pool for it is started at the first call and kept.
        fn: a module-level function. `mesh` is a 1-D cpu DeviceMesh named "dp" over all ranks. At the start of each
            call torch's and random's seeds are 0 and the warnings filters are the default ones; torch uses 1 thread.
        args: pickled once for all ranks. In arguments and results, plain tensors travel as detached contiguous copies.
        timeout: seconds after which the call counts as hung. A deadlock is seen earlier: all ranks asleep for
            `IDLE_TIMEOUT` seconds (so functions must not sleep that long).

    Raises:
        RankFailure: with the traceback of every rank that failed, or the stacks of the ranks that hang.
    """
    __tracebackhide__ = True
    job = _dumps((fn, args))
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _RankPool(world_size)
    try:
        results = pool.call(job, timeout)
    except BaseException:
        _pools.pop(world_size, None)
        pool.kill()
        raise
    if pool.num_process_groups > MAX_PROCESS_GROUPS:
        del _pools[world_size]
        pool.close()
    return results


def shutdown() -> None:
    """End all pools in good order; conftest calls it when the session finishes."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(shutdown)


class _RankPool:
    """The parent's side of the ranks of one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_process_groups = 0
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._logs = [Path(self._directory.name) / f"rank{rank}" for rank in range(world_size)]
        # The parent serves the store: the system picks a free port, and nobody can take it between choice and use.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, self._store.port, theirs, str(self._logs[rank])),
                name=f"rank{rank}of{world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        try:
            self._gather(START_TIMEOUT, deadlock_is_idle=False)
        except BaseException:
            self.kill()
            raise

    def call(self, job: bytes, timeout: float) -> list[Any]:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank died between two calls; _gather reports it
                pipe.send_bytes(job)
        return [pickle.loads(value) for value in self._gather(timeout)]

    def _gather(self, timeout: float, *, deadlock_is_idle: bool = True) -> list[bytes]:
        """Wait until every rank is ready again; raise as soon as one failed, died or hangs."""
        values: dict[int, bytes] = {}
        ready: set[int] = set()
        errors: dict[int, str] = {}
        now = time.monotonic()
        deadline = now + timeout
        idle_since, cpu_before = now, None
        reason = ""
        while len(ready) < self.world_size:
            waiting = {self._pipes[r]: r for r in range(self.world_size) if r not in ready and r not in errors}
            for pipe in wait(list(waiting), timeout=0.25):
                rank = waiting[pipe]
                try:
                    kind, payload = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    kind, payload = "error", self._epitaph(rank)
                if kind == "value":
                    values[rank] = payload
                elif kind == "ready":
                    ready.add(rank)
                    self.num_process_groups = max(self.num_process_groups, payload)
                else:
                    if not errors:
                        deadline = time.monotonic() + FAILURE_GRACE
                    errors[rank] = payload
            now = time.monotonic()
            if len(errors) + len(ready) == self.world_size or (errors and now >= deadline):
                break
            if now >= deadline:
                reason = f"no result after {timeout:.0f} s"
                break
            if deadlock_is_idle and not errors:
                used = self._cpu_seconds_if_asleep(list(waiting.values()))
                budget = IDLE_CPU_SHARE * IDLE_TIMEOUT * len(waiting)
                if used is None or cpu_before is None or used - cpu_before > budget:
                    idle_since, cpu_before = now, used
                elif now - idle_since >= IDLE_TIMEOUT:
                    reason = f"deadlock, all of its ranks have been asleep for {IDLE_TIMEOUT:.0f} s"
                    break
        if not errors and not reason:
            return [values.get(rank, b"") for rank in range(self.world_size)]
        stuck = [rank for rank in range(self.world_size) if rank not in errors and rank not in values]
        raise RankFailure(self._report(reason, errors, values, stuck), errors, stuck)

    def _report(self, reason: str, errors: dict[int, str], values: dict[int, bytes], stuck: list[int]) -> str:
        lines = []
        by_text: dict[str, list[int]] = {}
        # Who failed in the function comes before those that waited for it at the barrier.
        for rank, text in sorted(errors.items(), key=lambda item: item[0] in values):
            by_text.setdefault(text, []).append(rank)
        for text, ranks in by_text.items():
            lines += [f"on {_ranks(ranks)} of {self.world_size}:", text.rstrip()]
        if reason:
            lines.append(f"{_ranks(range(self.world_size))}: {reason}")
            finished = sorted(values)
            if finished:
                lines.append(f"returned from the function and waiting for the others: {_ranks(finished)}")
            for rank in stuck:
                lines += [f"rank {rank} is stuck at (innermost frame first):", self._stack(rank)]
        elif stuck:
            lines.append(f"{_ranks(stuck)} had not finished, as a rule because of the failure above")
        return "\n".join(lines)

    def _stack(self, rank: int) -> str:
        """What faulthandler writes when the rank is asked for its stacks."""
        log = self._logs[rank]
        before = log.stat().st_size
        try:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        except (OSError, AttributeError):
            return "  (gone)"
        stop = time.monotonic() + 1.0
        while time.monotonic() < stop and log.stat().st_size == before:
            time.sleep(0.02)
        time.sleep(0.05)
        text = log.read_bytes()[before:].decode(errors="replace")
        return _without_harness_frames(text) or "  (no Python stack: the rank does not answer)"

    def _epitaph(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(2.0)
        code = process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        log = self._logs[rank].read_text(errors="replace") if self._logs[rank].exists() else ""
        return f"the process ended with {cause}\n{log}"

    def _cpu_seconds_if_asleep(self, ranks: Sequence[int]) -> float | None:
        """CPU time used by these ranks so far, or None if one of them runs (or the system cannot tell)."""
        total = 0.0
        for rank in ranks:
            try:
                fields = Path(f"/proc/{self._processes[rank].pid}/stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                return None
            if fields[0] != "S":
                return None
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ask the ranks to leave together; kill those that do not."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        stop = time.monotonic() + 10.0
        for process in self._processes:
            process.join(max(0.0, stop - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=False):
            process.join(10.0)
            pipe.close()
        self._directory.cleanup()


def _serve(rank: int, world_size: int, port: int, pipe: Connection, log: str) -> None:
    """A rank's life: join the group, then serve calls until the parent says stop or goes away."""
    stacks = open(log, "w")  # noqa: SIM115 (faulthandler writes to it until the process ends)
    faulthandler.enable(stacks)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    try:
        mesh = _join_group(rank, world_size, port)
    except BaseException:
        pipe.send_bytes(_dumps(("error", traceback.format_exc())))
        return
    num_frozen = _collect(0)
    pipe.send_bytes(_dumps(("ready", 0)))
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        if not job:
            break
        try:
            value = _run_job(job, rank, world_size, mesh)
        except BaseException as error:
            pipe.send_bytes(_dumps(("error", _format(error))))
            continue  # no barrier: the parent kills the pool
        pipe.send_bytes(_dumps(("value", value)))
        del value
        num_frozen = _collect(num_frozen)
        try:
            dist.barrier()
        except BaseException as error:
            pipe.send_bytes(_dumps(("error", f"at the barrier after the call:\n{_format(error)}")))
            continue
        pipe.send_bytes(_dumps(("ready", len(dist.distributed_c10d._world.pg_map))))
    # Without a barrier first, gloo now and then aborts in destroy_process_group (torch 2.13).
    dist.barrier()
    dist.destroy_process_group()


def _collect(num_frozen: int) -> int:
    """Collect what the call left, and freeze what stays whenever modules were imported; returns their number.

    What an import makes is immortal. Without this, each collection would walk all of it: 0.1 s for torch, 0.4 s later on.
    """
    gc.collect()
    if len(sys.modules) != num_frozen:
        gc.freeze()
    return len(sys.modules)


def _join_group(rank: int, world_size: int, port: int) -> dist.DeviceMesh:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
    # Groups that the code under test makes take their time-out from here: half an hour in stock torch.
    dist.distributed_c10d.default_pg_timeout = timeout
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


def _run_job(job: bytes, rank: int, world_size: int, mesh: dist.DeviceMesh) -> bytes:
    fn, args = pickle.loads(job)
    torch.manual_seed(0)
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return _dumps(fn(rank, world_size, mesh, *args))


def _format(error: BaseException) -> str:
    """The traceback without the harness's frames; for a bare assert also the values of the failing frame's names."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    if isinstance(error, AssertionError) and trace is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        shown = [f"    {name} = {_short(value)}" for name, value in trace.tb_frame.f_locals.items()]
        text += "  with\n" + "\n".join(shown) if shown else ""
    return text


def _short(value: object, width: int = 300) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= width else text[:width] + " …"


def _without_harness_frames(stacks: str) -> str:
    lines = [line for line in stacks.splitlines() if __file__ not in line and "multiprocessing" not in line]
    return "\n".join(line for line in lines if "<string>" not in line).strip()


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class _Pickler(pickle.Pickler):
    """Plain tensors by value: a view carries its own elements, not the whole storage behind it; no shared memory."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided and obj.device.type == "cpu":
            flat = obj.detach().contiguous().reshape(-1)
            return _tensor_from_bytes, (flat.view(torch.uint8).numpy().tobytes(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _dumps(obj: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()
