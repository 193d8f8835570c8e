"""What this process holds, for whoever looks for leaks.  Call on the event loop's thread."""

import asyncio
import threading

from warmline_common.process.file_limits import open_descriptors
from warmline_common.protocol.messages import Vitals


def take_vitals(bytes_unaccounted: int = 0) -> Vitals:
    return Vitals(
        tasks=len(asyncio.all_tasks()),
        threads=threading.active_count(),
        descriptors=open_descriptors(),
        bytes_unaccounted=bytes_unaccounted,
    )
