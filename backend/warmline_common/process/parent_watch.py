"""Watch of a child on its parent: no process of the pair outlives the `warmline serve` that started it.

`serve` holds the write end of a pipe that no other process has; its children inherit the read end, whose number is in
``WARMLINE_PARENT_PIPE``.  However serve ends, kill -9 included, the kernel closes the write end and the children read
the end of the file.  This works on every platform; `prctl` is Linux's alone and macOS has no equivalent.
"""

import os
import signal
import threading

PARENT_PIPE = "WARMLINE_PARENT_PIPE"


def watch_parent(grace_s: float) -> None:
    """End this process when its parent ends; call once, early in ``__main__``.  Does nothing where no serve is the
    parent.

    When the parent is gone this process gets SIGTERM; if it has not ended within `grace_s`, it exits at once with
    code 1.  Watches on a daemon thread; the main thread must not block SIGTERM.
    """
    number = os.environ.pop(PARENT_PIPE, "")
    if not number:
        return
    descriptor = int(number)
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_wait_for_parent_exit, args=(descriptor, grace_s), name="lifeline", daemon=True).start()


def _wait_for_parent_exit(descriptor: int, grace_s: float) -> None:
    while os.read(descriptor, 1):  # nothing is ever written; b"" is the end
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_s)
    os._exit(1)
