"""A process that is struck before one of its writes: killed, or told that the disk is full."""

import errno
import os
import sys
import traceback

WRITES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.utime", "os.chmod"}
NEED_ROOM = {"open", "os.mkdir", "os.link", "os.symlink"}


def counted(event, args):
    return event in WRITES or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"))


def in_child(work, strike, errors=()):
    """
    What a process exits with that runs `work`, and `strike(number, event)` before each of its writes: 0; 1 after one
    of `errors` or a full disk; 9 killed; 3 after anything else.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    number = 0

    def hook(event, args):
        nonlocal number
        if number is not None and counted(event, args):
            number += 1
            strike(number, event)

    try:
        sys.addaudithook(hook)
        work()
        code = 0
    except errors:
        code = 1
    except BaseException as error:
        code = 1 if isinstance(error, OSError) and error.errno == errno.ENOSPC else 3  # the command says it in a line
        number = None
        traceback.print_exc()
    number = None
    os._exit(code)


def kill(at):
    def strike(number, event):
        if number == at:
            os._exit(9)

    return strike


def fill_the_disk(at):
    def strike(number, event):
        if number >= at and event in NEED_ROOM:
            raise OSError(errno.ENOSPC, "No space left on device")

    return strike
