"""A Python loop without visible operations never comes back to the event queue: a thread watches."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from tilewise.sim.findings import _SIM, Site

if TYPE_CHECKING:
    from tilewise.sim.engine import Engine, Partition


class RunawayLoop(BaseException):
    """Thrown into a kernel by the watchdog. Not an Exception, so that a kernel cannot swallow it."""

    def site(self, partition: Partition) -> Site:
        place = ("?", 0, "?")
        trace = self.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if not code.co_filename.startswith(_SIM):
                place = (code.co_name, trace.tb_lineno, code.co_filename)
            trace = trace.tb_next
        return Site(*place, partition.full_name, partition.tile)


class Watchdog:
    """Throws RunawayLoop into the simulating thread if the engine makes no event for `seconds`."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine, self.seconds = engine, seconds
        self.thread_id = threading.get_ident()
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        self.thread = threading.Thread(target=self._watch, name="tilewise-sim-watchdog", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        with self.lock:  # after this, the watchdog throws no more
            self.stop.set()

    def _watch(self) -> None:
        last = -1
        while not self.stop.wait(self.seconds):
            with self.lock:
                if self.stop.is_set():
                    return
                if self.engine.events == last:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self.thread_id), ctypes.py_object(RunawayLoop)
                    )
                    return
                last = self.engine.events
