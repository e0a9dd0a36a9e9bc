"""What a thread may ask of the system to be on time: priority, cores, locked memory."""

from collections.abc import Callable
import ctypes
from dataclasses import dataclass
import os

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.parameters import parameter, validate

_MCL_CURRENT_AND_FUTURE = 3


@dataclass(frozen=True, slots=True)
class RealtimeParameters:
    """Wishes to the system; a refused wish is logged and the node goes on without it."""

    rt_priority: int = parameter(
        0, 'SCHED_FIFO priority of control and policy thread, 0 for none.', range=(0, 99)
    )
    cpu_affinity: str = parameter(
        '', 'Cores of control and policy thread, such as "2,3"; empty for all.'
    )
    lock_memory: bool = parameter(False, 'Lock all memory of the process into RAM.')

    def __post_init__(self):
        validate(self)
        self.cores()

    def cores(self) -> set[int]:
        """Return ``cpu_affinity`` as numbers."""
        try:
            return {int(core) for core in self.cpu_affinity.split(',') if core.strip()}
        except ValueError:
            rule = 'must be core numbers separated by commas'
            raise ConfigError('cpu_affinity', rule, self.cpu_affinity) from None


def apply_to_thread(
    wishes: RealtimeParameters, thread_id: int, warn: Callable[[str], None]
) -> None:
    """
    Give one thread its priority and cores.

    Parameters
    ----------
    wishes : RealtimeParameters
        What to ask for.
    thread_id : int
        Native id of the thread; 0 is the calling one.
    warn : callable
        Takes one line for each wish the system refuses.

    """
    if wishes.rt_priority:
        try:
            parameters = os.sched_param(wishes.rt_priority)
            os.sched_setscheduler(thread_id, os.SCHED_FIFO, parameters)
        except OSError as error:
            warn(
                f'rt_priority {wishes.rt_priority} refused by the system ({error.strerror}), '
                'going on with normal scheduling; it needs CAP_SYS_NICE or an rtprio limit'
            )
    if wishes.cores():
        try:
            os.sched_setaffinity(thread_id, wishes.cores())
        except OSError as error:
            warn(
                f'cpu_affinity {wishes.cpu_affinity} refused by the system ({error.strerror}), '
                f'going on with cores {sorted(os.sched_getaffinity(thread_id))}'
            )


def lock_memory(wishes: RealtimeParameters, warn: Callable[[str], None]) -> None:
    """Lock the memory of the process if wished, so that no tick waits for a page."""
    if not wishes.lock_memory:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT_AND_FUTURE) != 0:
        reason = os.strerror(ctypes.get_errno())
        warn(
            f'lock_memory refused by the system ({reason}), going on with pageable memory; '
            'it needs CAP_IPC_LOCK or an unlimited memlock limit'
        )
