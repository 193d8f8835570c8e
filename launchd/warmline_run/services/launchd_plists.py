"""An agent as launchd's property list, and back.  Pure."""

import plistlib
from collections.abc import Mapping
from typing import Any

from warmline_run.services.manager import InstalledService
from warmline_run.services.service import ServiceProcess

THROTTLE_S = 30  # launchd's shortest time between two starts: a model takes long to load in vain
DESCRIPTORS = 8192  # macOS gives 256
UMASK = 0o077


def render_plist(label: str, process: ServiceProcess) -> bytes:
    output = str(process.output)
    return plistlib.dumps(
        {
            "Label": label,
            "ProgramArguments": process.arguments,
            "EnvironmentVariables": process.environment,
            "WorkingDirectory": str(process.home),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},  # so that a stop, or a configuration error, is the end
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": process.exit_timeout_s,
            "ProcessType": "Interactive",  # or macOS slows processor and disk down
            "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS},
            "StandardOutPath": output,
            "StandardErrorPath": output,
            "Umask": UMASK,
        },
        sort_keys=False,
    )


def parse_plist(data: bytes) -> InstalledService:
    """Raises ValueError for what is no plist of an agent."""
    try:
        plist: Mapping[str, Any] = plistlib.loads(data)
        return InstalledService(
            arguments=[str(word) for word in plist["ProgramArguments"]],
            environment={str(name): str(value) for name, value in plist["EnvironmentVariables"].items()},
            exit_timeout_s=int(plist["ExitTimeOut"]),
        )
    except (plistlib.InvalidFileException, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no plist of ours: {error!r}") from None
    except Exception as error:  # noqa: BLE001  expat's own, which plistlib lets through
        raise ValueError(f"no plist: {error}") from None
