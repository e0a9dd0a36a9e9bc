"""The base of managed nodes: transitions that log what went wrong and leave nothing half done."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
import traceback

from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from vla_edge_ros.errors import VlaEdgeError
from vla_edge_ros.nodes.ros_parameters import RosParameters

SUCCESS, FAILURE, ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)


class ManagedNode(LifecycleNode):
    """
    A lifecycle node whose subclasses fill ``_setup``, ``_start``, ``_stop``, ``_teardown``.

    ``_stop`` and ``_teardown`` undo whatever part of ``_start`` and ``_setup`` was done, also
    when called twice. What a user can mend (``VlaEdgeError``) is one line in the log and leaves
    the state as it was; anything else is logged with its traceback, which rclpy would swallow,
    and ends in ``unconfigured``.

    Parameters
    ----------
    name : str
        Node name.
    parameter_sets : sequence of parameter sets
        Declared at once; their read-only fields are fixed while the node is configured.
    interruptible : callable
        Context manager for work that a stop signal may abandon.

    Attributes
    ----------
    last_error : str
        What went wrong since the last attempt to configure or activate, '' if nothing did.

    """

    def __init__(
        self,
        name: str,
        parameter_sets: Sequence[type],
        interruptible: Callable[[], AbstractContextManager] = nullcontext,
        **options,
    ):
        super().__init__(name, **options)
        self._interruptible = interruptible
        self._is_configured = False
        self.last_error = ''
        self.parameters = RosParameters(self, parameter_sets, locked=lambda: self._is_configured)

    @property
    def state(self) -> str:
        """Return the label of the present lifecycle state."""
        return self._state_machine.current_state[1]

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Configure: load, plan, compile, warm up."""
        self.last_error = ''
        self._is_configured = True
        result = self._run('configure', FAILURE, self._setup, undo=self._teardown)
        self._is_configured = result is SUCCESS
        return result

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Activate: start to act."""
        self.last_error = ''
        return self._run('activate', FAILURE, self._start, undo=self._stop)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Deactivate: the safe action goes out last."""
        return self._run('deactivate', ERROR, self._stop)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Clean up: give everything back."""
        self._is_configured = False
        return self._run('clean up', ERROR, self._teardown)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Shut down from any state, in order."""
        return self._run('shut down', ERROR, self._stop_and_teardown)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Return to unconfigured, with the safe action sent and everything given back."""
        self._is_configured = False
        return self._run('recover', FAILURE, self._stop_and_teardown)

    def close(self) -> None:
        """Stop and give everything back, from whatever state; the owner calls it at the end."""
        self._run('close', ERROR, self._stop_and_teardown)

    def _setup(self) -> None:
        raise NotImplementedError

    def _start(self) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError

    def _teardown(self) -> None:
        raise NotImplementedError

    def _stop_and_teardown(self) -> None:
        try:
            self._stop()
        finally:
            self._teardown()

    def _run(
        self,
        verb: str,
        refusal: TransitionCallbackReturn,
        action: Callable[[], None],
        undo: Callable[[], None] = lambda: None,
    ) -> TransitionCallbackReturn:
        """Run one transition; ``refusal`` is the result when the user can mend the cause."""
        try:
            action()
        except VlaEdgeError as error:
            self.last_error = f'cannot {verb}: {error}'
            self.get_logger().error(self.last_error)
            result = refusal
        except Exception as error:
            self.last_error = f'cannot {verb}: {type(error).__name__}: {error}'
            self.get_logger().error(f'{self.last_error}\n{traceback.format_exc()}')
            result = ERROR
        else:
            return SUCCESS
        try:
            undo()
        except Exception:
            self.get_logger().error(f'while undoing:\n{traceback.format_exc()}')
            result = ERROR
        return result
