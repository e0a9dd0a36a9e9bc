"""
Off-screen rendering without a display: EGL, else OSMesa, chosen when first needed.

MuJoCo picks its GL library on import and fails there when it is missing. Here it is imported
without GL, so that physics alone runs on any machine.
"""

import ctypes
import os
from types import ModuleType
from typing import Any

import numpy as np

from vla_edge_ros.errors import BackendUnavailable

INSTALL_HINT = (
    'needs libEGL or libOSMesa; on Debian or Ubuntu: '
    'apt install libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri'
)


def import_mujoco() -> ModuleType:
    """
    Import MuJoCo with its own GL choice switched off.

    Raises
    ------
    BackendUnavailable
        MuJoCo is not installed.

    """
    chosen = os.environ.get('MUJOCO_GL')
    os.environ['MUJOCO_GL'] = 'disabled'
    try:
        import mujoco
    except ImportError as error:
        rule = 'must be installed for the simulator: pip install mujoco'
        raise BackendUnavailable('mujoco', rule, str(error)) from error
    finally:
        if chosen is None:
            del os.environ['MUJOCO_GL']
        else:
            os.environ['MUJOCO_GL'] = chosen
    return mujoco


def choose_gl_backend() -> str:
    """
    Return ``egl`` or ``osmesa``: what ``MUJOCO_GL`` says, else the first library found.

    Raises
    ------
    BackendUnavailable
        Neither library loads, or ``MUJOCO_GL`` names something else.

    """
    libraries = {'egl': 'libEGL.so.1', 'osmesa': 'libOSMesa.so.8'}
    chosen = os.environ.get('MUJOCO_GL', '').strip().lower()
    if chosen in libraries:
        return chosen
    if chosen:
        raise BackendUnavailable('MUJOCO_GL', 'must be egl, osmesa or unset', chosen)
    for backend, library in libraries.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return backend
    raise BackendUnavailable('rendering', INSTALL_HINT, 'neither')


def make_gl_context(width: int, height: int) -> Any:
    """
    Return a current off-screen GL context.

    Raises
    ------
    BackendUnavailable
        The library is missing or offers no usable device.

    """
    backend = choose_gl_backend()
    try:
        if backend == 'egl':
            from mujoco.egl import GLContext
        else:
            from mujoco.osmesa import GLContext
        context = GLContext(width, height)
        context.make_current()
    except Exception as error:
        # PyOpenGL reports a missing library as AttributeError, ImportError, GLError or OSError.
        raise BackendUnavailable(
            f'rendering with {backend}', INSTALL_HINT, f'{type(error).__name__}: {error}'
        ) from error
    return context


class Renderer:
    """
    Draw one camera of a model; usable only in the thread that made it.

    Shadows and reflections are off: in software they cost ten times the rest. So does every
    one of the ``samples`` a pixel; 0 means no smoothing of edges.
    """

    def __init__(self, model: Any, camera: str, width: int, height: int, samples: int = 0):
        self._mujoco = import_mujoco()
        self._model = model
        self._scene = self._mujoco.MjvScene(model, maxgeom=200)
        self._scene.flags[self._mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._scene.flags[self._mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._option = self._mujoco.MjvOption()
        self._camera = self._mujoco.MjvCamera()
        self._camera.type = self._mujoco.mjtCamera.mjCAMERA_FIXED
        self._camera.fixedcamid = model.camera(camera).id
        self._rectangle = self._mujoco.MjrRect(0, 0, width, height)
        self._pixels = np.empty((height, width, 3), np.uint8)
        self._gl_context = make_gl_context(width, height)
        model.vis.global_.offwidth = width
        model.vis.global_.offheight = height
        model.vis.quality.offsamples = samples
        self._context = self._mujoco.MjrContext(
            model, self._mujoco.mjtFontScale.mjFONTSCALE_100.value
        )
        self._mujoco.mjr_setBuffer(
            self._mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context
        )

    def render(self, data: Any) -> np.ndarray:
        """Return the picture as a new uint8 [height, width, 3] array, RGB."""
        self._gl_context.make_current()
        self._mujoco.mjv_updateScene(
            self._model, data, self._option, None, self._camera,
            self._mujoco.mjtCatBit.mjCAT_ALL.value, self._scene,
        )
        self._mujoco.mjr_render(self._rectangle, self._scene, self._context)
        self._mujoco.mjr_readPixels(self._pixels, None, self._rectangle, self._context)
        return np.ascontiguousarray(self._pixels[::-1])

    def close(self) -> None:
        """Free the GL context; a second call does nothing."""
        if self._gl_context is not None:
            self._gl_context.make_current()
            self._context.free()
            self._gl_context.free()
            self._gl_context = None
