"""Opening of regular files alone.

A FIFO in the place of a file would block whoever opens it until another process opens its other end; a device such as
/dev/zero never ends.
"""

import errno
import os
import stat
from pathlib import Path

NOT_REGULAR = "it is no regular file"


def open_regular(path: str | Path, flags: int) -> int:
    """Descriptor of a file, or of what a link leads to; a created one has mode 0600.  Never waits.

    Raises OSError, also for anything that is no regular file.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    return descriptor
