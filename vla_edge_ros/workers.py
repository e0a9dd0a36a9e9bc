"""Work shared out over processes, which end with this one in order."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
import multiprocessing
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
import os
import signal
from typing import Any

from vla_edge_ros.errors import VlaEdgeError
from vla_edge_ros.nodes.process import StopRequest

THREADS = ('NUMBA_NUM_THREADS', 'OMP_NUM_THREADS', 'LP_NUM_THREADS')
"""Variables that say how many threads a library uses in a process."""
POLL_S = 0.1
STOP_TIMEOUT_S = 2.0


def run_in_workers(
    work: Callable[[Any], Iterator[Any]], shares: Sequence[Any], stop: StopRequest,
    always_apart: bool = False,
) -> Iterator[Any]:
    """
    Yield what ``work(share)`` yields for every share, in whatever order it comes.

    Parameters
    ----------
    work : callable
        A generator function that can be pickled.
    shares : sequence
        One process for each; a single one is worked off in this process.
    stop : StopRequest
        Ends all processes when requested.
    always_apart : bool
        Give a single one a process too, so that it runs as many would: on one thread.

    Raises
    ------
    VlaEdgeError
        A worker could not go on; its message says why.
    Interrupted
        A signal came.

    """
    if len(shares) == 1 and not always_apart:
        yield from _work_here(work(shares[0]), stop)
        return
    # One thread a worker: more would only fight over the cores. Read by libraries on import.
    for variable in THREADS:
        os.environ.setdefault(variable, '1')
    context = multiprocessing.get_context('spawn')
    # Its start would unblock the signal that is blocked below.
    resource_tracker.ensure_running()
    processes, receivers = [], []
    try:
        for number, share in enumerate(shares):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_work_there, args=(partial(work, share), sender), name=f'worker-{number}',
                daemon=True)
            # Inherited: Ctrl-C reaches all processes of a terminal but is the parent's business.
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        yield from _receive(receivers, stop)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(STOP_TIMEOUT_S)


def _work_here(items: Iterator[Any], stop: StopRequest) -> Iterator[Any]:
    end = object()
    while True:
        with stop.interruptible():
            item = next(items, end)
        if item is end:
            return
        yield item


def _work_there(work: Callable[[], Iterator[Any]], sender: Connection) -> None:
    try:
        for item in work():
            sender.send((item,))
        sender.send(None)
    except VlaEdgeError as error:
        sender.send(str(error))
    except BrokenPipeError:
        # The parent was killed; nobody is left to tell.
        return


def _receive(receivers: list[Connection], stop: StopRequest) -> Iterator[Any]:
    """Yield what the workers send: items in tuples, then None; or why one could not go on."""
    while receivers:
        stop.check()
        for receiver in wait(receivers, POLL_S):
            try:
                message = receiver.recv()
            except EOFError:
                stop.check()
                message = 'a worker process ended early'
            if isinstance(message, str):
                raise VlaEdgeError(message)
            if message is None:
                receivers.remove(receiver)
            else:
                yield message[0]
