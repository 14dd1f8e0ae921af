"""Runs the parts of a problem side by side, each on a thread of its own.

PyTorch would rather split every operation among its threads, and each operation ends with all of them
waiting for the last. A tile is a dozen operations of some 10 to 200 microseconds: if the machine has
anything else to do, one of the threads is soon without a core, and each wait lasts until it gets one,
milliseconds. Threads with parts of their own have nothing to wait for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

# Between operations a thread holds the interpreter's lock, perhaps a tenth of its time. With more
# cores than this, each part's operations get several threads.
MOST_WORKERS = 8

T = TypeVar("T")


def run(work: Callable[[T], None], parts: Iterable[T], *, in_order: bool = False) -> None:
    """Call ``work`` on each part, on as many threads as PyTorch has (``torch.get_num_threads``).

    in_order: one after another instead, for parts that are not independent.
    """
    with torch.autocast("cpu", enabled=False):  # the caller's, which its products are not meant for
        _run(work, list(parts), in_order)


def _run(work: Callable[[T], None], parts: list[T], in_order: bool) -> None:
    workers = min(MOST_WORKERS, torch.get_num_threads(), len(parts))
    if in_order or workers < 2:
        for part in parts:
            work(part)
        return
    inference = torch.is_inference_mode_enabled()

    def without_gradients(part: T) -> None:
        # Both modes belong to a thread, and these threads are not the caller's.
        with torch.inference_mode(inference), torch.no_grad():
            work(part)

    futures: list[Future[None]] = []
    try:
        pool = _pool(os.getpid(), workers, torch.get_num_threads())
        for part in parts:
            futures.append(pool.submit(without_gradients, part))
    except RuntimeError:  # the main thread has ended, and with it all pools; other threads go on
        for part in parts[len(futures) :]:
            work(part)
    for future in futures:
        future.result()  # raises here what a part has raised


def threads_each() -> int:
    """How many of PyTorch's threads the operations of one part get when there are many parts."""
    return max(torch.get_num_threads() // MOST_WORKERS, 1)


@lru_cache(maxsize=8)
def _pool(process: int, workers: int, threads: int) -> ThreadPoolExecutor:
    """``workers`` threads that share PyTorch's ``threads``. A fork has none of its parent's: it gets
    its own by its number as a process."""
    ready = threading.Barrier(workers)

    def start() -> None:
        torch.get_num_threads()  # the first call in a thread sets the default, so it must not come later
        torch.set_num_threads(threads // workers)

    pool = ThreadPoolExecutor(workers, thread_name_prefix="tilewise", initializer=start)
    for _ in pool.map(lambda _: ready.wait(), range(workers)):
        pass
    torch.set_num_threads(threads)  # the workers have also set the default for new threads
    return pool
