"""An agent as launchd's property list, and back.  Pure."""

import plistlib
from collections.abc import Mapping
from typing import Any

from warmline_run.services.manager import Installed
from warmline_run.services.service import Agent

THROTTLE_S = 30  # launchd's shortest time between two starts: a model takes long to load in vain
DESCRIPTORS = 8192  # macOS gives 256
UMASK = 0o077


def content(label: str, agent: Agent) -> bytes:
    output = str(agent.output)
    return plistlib.dumps(
        {
            "Label": label,
            "ProgramArguments": agent.arguments,
            "EnvironmentVariables": agent.environment,
            "WorkingDirectory": str(agent.home),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},  # so that a stop, or a configuration error, is the end
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": agent.exit_timeout_s,
            "ProcessType": "Interactive",  # or macOS slows processor and disk down
            "SoftResourceLimits": {"NumberOfFiles": DESCRIPTORS},
            "StandardOutPath": output,
            "StandardErrorPath": output,
            "Umask": UMASK,
        },
        sort_keys=False,
    )


def read(data: bytes) -> Installed:
    """Raises ValueError for what is no plist of an agent."""
    try:
        plist: Mapping[str, Any] = plistlib.loads(data)
        return Installed(
            arguments=[str(word) for word in plist["ProgramArguments"]],
            environment={str(name): str(value) for name, value in plist["EnvironmentVariables"].items()},
            exit_timeout_s=int(plist["ExitTimeOut"]),
        )
    except (plistlib.InvalidFileException, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no plist of ours: {error!r}") from None
    except Exception as error:  # noqa: BLE001  expat's own, which plistlib lets through
        raise ValueError(f"no plist: {error}") from None
