"""What lies in the memory of a backend's device, as far as everybody else is concerned."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """
    A C-contiguous array on a device; only the backend that made it reads it.

    Parameters
    ----------
    address : int
        In the memory of the device; what lies there may be overwritten by the next frame.
    shape : tuple of int
    dtype : type
        NumPy scalar type.

    """

    address: int
    shape: tuple[int, ...]
    dtype: type[np.generic]

    def __len__(self) -> int:
        return self.shape[0]
