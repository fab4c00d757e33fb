"""What torchrun does for processes on one machine, but with the imports done once: they take most of a test's time."""

import os
import signal
import socket
import sys


def fork(processes: int):
    """Returns in each of the processes. The one that was there waits for them, and ends as they do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = set()
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return
        children.add(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status != 0:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    sys.exit(0)
