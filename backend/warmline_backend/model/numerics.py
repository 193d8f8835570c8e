"""Everything that decides rounding in this process.  Complete once mlx has loaded its libraries.

In exact mode KV is reused only where all of this is equal: another device, library or number of threads adds in
another order.
"""

import os
import platform
from importlib import metadata

import mlx.core as mx
from threadpoolctl import threadpool_info

LIBRARIES = ("mlx", "nvidia-")  # mlx, mlx-lm, mlx's back ends and their NVIDIA libraries
DEVICE_KEYS = ("device_name", "architecture", "compute_capability_major", "compute_capability_minor")
BLAS_KEYS = ("internal_api", "version", "threading_layer", "architecture", "num_threads")
OTHER_BLAS_PATHS = ("numpy.libs", "scipy.libs")  # these bring a BLAS of their own
PREFILL_REVISION = 2  # raised where chunks are computed in another way, which may round differently
MLX_ENVIRONMENT_VARIABLES = ("MLX_ENABLE_TF32", "MLX_DISABLE_COMPILE")


def describe_numerics() -> dict[str, object]:
    """Describe the numerics as JSON, equal in every process that rounds alike."""
    device = mx.device_info()
    return {
        "libraries": sorted(
            [package.name, package.version]
            for package in metadata.distributions()
            if package.name and package.name.startswith(LIBRARIES)
        ),
        "device": {key: device.get(key) for key in DEVICE_KEYS},
        "machine": platform.machine(),
        "macos": platform.mac_ver()[0],  # Accelerate and Metal's compiler come with it
        "blas": sorted(
            [str(library.get(key)) for key in BLAS_KEYS]
            for library in threadpool_info()
            if library["user_api"] == "blas" and not any(name in library["filepath"] for name in OTHER_BLAS_PATHS)
        ),
        "prefill": PREFILL_REVISION,
        "switches": {name: os.environ.get(name) for name in MLX_ENVIRONMENT_VARIABLES},
    }
