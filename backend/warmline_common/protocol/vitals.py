"""Resources of this process, for leak checks.  Call on the event loop's thread."""

import asyncio
import threading

from warmline_common.process.file_limits import count_open_descriptors
from warmline_common.protocol.messages import ProcessStats


def read_process_stats(bytes_unaccounted: int = 0) -> ProcessStats:
    return ProcessStats(
        tasks=len(asyncio.all_tasks()),
        threads=threading.active_count(),
        descriptors=count_open_descriptors(),
        bytes_unaccounted=bytes_unaccounted,
    )
