"""One thread beside the one that decodes, which does the newest job and never makes anyone wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")


class NewestFirst(Generic[Job]):
    """Runs ``work(job)`` in a thread, begun with the first job; a job that waits gives way to a newer one.

    What ``work`` raises is raised by the next :meth:`check`.
    """

    def __init__(self, work: Callable[[Job], None]) -> None:
        self._work = work
        self._ready = threading.Condition()
        self._waiting: list[Job] = []
        self._busy = self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Have it done, in place of what waits; returns at once."""
        with self._ready:
            if self._closed:
                return
            self._waiting[:] = [job]
            self._ready.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bmoe-ranking", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise what a job has raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until nothing waits or is being done."""
        with self._ready:
            self._ready.wait_for(lambda: not self._waiting and not self._busy)

    def close(self) -> None:
        """End the thread, after the job that it does. May be called twice."""
        with self._ready:
            self._closed = True
            self._waiting.clear()
            self._ready.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                job, self._busy = self._waiting.pop(), True
            try:
                self._work(job)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that decodes
                self._error = error
            finally:
                with self._ready:
                    self._busy = False
                    self._ready.notify_all()
