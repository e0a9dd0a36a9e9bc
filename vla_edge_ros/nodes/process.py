"""
One node, one process: start it, spin it, and end it in order whatever signal comes when.

This module imports nothing heavy, so that the signal handlers stand before rclpy, OpenCV and
Numba are loaded. SIGINT and SIGTERM only set a flag; code that may be abandoned at any line
(imports, loading weights, compiling) runs inside :meth:`StopRequest.interruptible`, where the
signal raises. Everything else, above all what creates shared memory, runs to its end first.
"""

from collections.abc import Iterator
from contextlib import contextmanager, ExitStack
import importlib
from pathlib import Path
import signal
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SPIN_TIMEOUT_S = 0.1
RETRY_S = 0.005
USAGE = """\
usage: {name} [--ros-args -p NAME:=VALUE ... --params-file FILE -r FROM:=TO ...]

A ROS 2 node: it takes no options of its own, only ROS arguments behind --ros-args, and runs until
SIGINT or SIGTERM. The README.md of vla_edge_ros lists its topics and services,
docs/parameters.md its parameters.
"""


class Interrupted(BaseException):
    """The end that a signal asks for; no ``except Exception`` swallows it."""


class StopRequest:
    """The wish of SIGINT or SIGTERM that this process end."""

    def __init__(self):
        self.requested = False
        self._may_raise = False

    def install(self) -> None:
        """Take over both signals, also those that a parent blocked until now."""
        for number in (*SIGNALS, signal.SIGALRM):
            signal.signal(number, self._handle)
        sys.unraisablehook = _hide_unraisable_interruption
        sys.excepthook = _hide_printed_interruption
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal has come."""
        if self.requested:
            raise Interrupted

    def ignore_further(self) -> None:
        """Leave the interpreter's own shutdown undisturbed."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """
        Let a signal end the block by raising ``Interrupted``; it may have come before.

        An exception raised inside a callback from C, such as LLVM's, is lost there: so it is
        raised again and again until the block has ended, and whatever error the loss led to
        gives way to it.
        """
        self._may_raise = True
        try:
            self.check()
            yield
        except Exception:
            if self.requested:
                raise Interrupted from None
            raise
        finally:
            self._may_raise = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _handle(self, _number, _frame) -> None:
        self.requested = True
        if self._may_raise:
            signal.setitimer(signal.ITIMER_REAL, RETRY_S)
            raise Interrupted


def _hide_unraisable_interruption(lost) -> None:
    """Report what Python could not raise, except for an interruption, which comes again."""
    if lost.exc_type is not Interrupted:
        sys.__unraisablehook__(lost)


def _hide_printed_interruption(kind, error, traceback) -> None:
    """Do the same with what C code prints before it fails, as NumPy's import does."""
    if kind is not Interrupted:
        sys.__excepthook__(kind, error, traceback)


def run_node(module: str, class_name: str) -> int:
    """
    Run one node until a signal comes.

    Parameters
    ----------
    module, class_name : str
        Where the node's class lives. It is built as ``cls(interruptible)`` and offers ``close()``,
        which joins its threads and gives everything back. A callback of it may raise
        ``SystemExit``, which ends the process in the same order.

    Returns
    -------
    int
        Exit code: 0 after a signal, 1 when the node could not be built, 2 for an argument that
        is none of ROS.

    """
    name = Path(sys.argv[0]).stem
    if {'-h', '--help'} & set(sys.argv[1:]):
        print(USAGE.format(name=name), end='')
        return 0
    stop = StopRequest()
    stop.install()
    try:
        with stop.interruptible():
            import rclpy
            from rclpy.executors import SingleThreadedExecutor
            from rclpy.signals import SignalHandlerOptions
            from rclpy.utilities import remove_ros_args

            from vla_edge_ros.errors import VlaEdgeError

            node_class = getattr(importlib.import_module(module), class_name)
    except Interrupted:
        stop.ignore_further()
        return 0
    except ImportError as error:
        print(f'{class_name}: cannot be loaded: {error}', file=sys.stderr)
        return 1

    # Leaving the stack runs bottom up and in full, whatever fails; the order matters: shutting
    # rclpy down under a running executor or thread aborts the process.
    with ExitStack() as stack:
        try:
            strangers = remove_ros_args(sys.argv)[1:]
            if strangers:
                rule = 'must stand behind --ros-args (see --help)'
                print(f'{name}: arguments {rule}, got {" ".join(strangers)!r}', file=sys.stderr)
                return 2
            rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
        except RuntimeError as error:
            print(f'{name}: wrong ROS arguments: {error}', file=sys.stderr)
            return 1
        stack.callback(rclpy.try_shutdown)
        try:
            node = node_class(stop.interruptible)
            stack.callback(node.destroy_node)
            executor = SingleThreadedExecutor()
            stack.callback(executor.shutdown)
            stack.callback(node.close)
            stack.callback(stop.ignore_further)
            executor.add_node(node)
            while not stop.requested:
                executor.spin_once(timeout_sec=SPIN_TIMEOUT_S)
        except Interrupted:
            pass
        except VlaEdgeError as error:
            print(f'{class_name}: {error}', file=sys.stderr)
            return 1
    return 0
