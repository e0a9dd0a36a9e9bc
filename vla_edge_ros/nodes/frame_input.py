"""Frames for the policy of a node, and how they reach its device, told in the log."""

from collections.abc import Callable
from contextlib import suppress

from vla_edge_ros.errors import TransportError
from vla_edge_ros.runtime.frame_buffer import FrameReader


class FrameInput(FrameReader):
    """
    A reader that brings frames to a policy's ``frame_target``.

    Parameters
    ----------
    name : str
        Of the frame buffer.
    target
        A ``FrameTarget`` with ``route``, which says how frames reach it and is '' while there are
        none; or None for a policy on the processor.
    log : callable
        Takes a line.

    """

    def __init__(self, name: str, target, log: Callable[[str], object]):
        super().__init__(name, target)
        self._log = log
        self._told = ''
        with suppress(TransportError):  # a tick will tell
            self.newest_sequence()  # attaches: what that costs is better spent now than in a tick

    def tell_route(self) -> str:
        """Return how frames reach the device, and log it if it is news; not from a tick."""
        route = '' if self._target is None else self._target.route
        if route and route != self._told:
            self._log(f'frames reach the GPU {route}')
            self._told = route
        return route
