"""A process that has imported what servers import, and forks them: a start without the seconds that imports take.

`outrider.fleet.forking` runs it as `python -P -m outrider.fleet.forkserver FD`, and asks at the other end of that
socket; when nobody holds that any more, this process ends. What forks a server is a child that ends at once, so whoever
asked adopts the server: that one hears how it ends, and this process is not missed when it is gone.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import socket
import sys
from contextlib import suppress
from importlib import import_module

from outrider.fleet import surroundings
from outrider.fleet.command_line import MODULE, show_command_line

READY = b"ready"  # the first word; then, for each server that is asked for, its pid
SERVERS = ("outrider.cli.main", "router.service", "verifier_svc.service", "drafter_svc.service")


def main() -> None:
    """Forks servers until whoever started this ends. Returns in each of them, too, once it has run."""
    starter = socket.socket(fileno=int(sys.argv[1]))
    surroundings.settle(1)  # a server sets its own number of threads before it computes
    for name in SERVERS:
        with suppress(ImportError):  # what is not installed is not served
            import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # no other thread would live on in a fork
        raise SystemExit(f"{threads} threads run after the imports, so nothing can be forked")
    gc.freeze()  # or a server's first collection would copy all that it shares with the others
    starter.send(READY)
    if (order := _fork(starter)) is not None:
        _be(order)


def _fork(starter: socket.socket) -> int | None:
    """Forks for each request. In a server, returns the descriptor of its order; here, None at the end."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(starter, 1, 3)
        if not request:
            return None
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            server = os.fork()
            if server == 0:
                output, errors, order = descriptors
                os.dup2(output, 1)
                os.dup2(errors, 2)
                for descriptor in (starter.detach(), reading, writing, output, errors):
                    os.close(descriptor)
                return order
            os.write(writing, b"%d" % server)
            os._exit(0)
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        os.waitpid(between, 0)
        starter.send(os.read(reading, 32))
        os.close(reading)


def _be(order: int) -> None:
    """Runs a command line, as a process started with it would from its start to its end."""
    with open(order, encoding="utf-8") as file:  # which comes once its starter is its parent
        said = file.read()
    if not said:  # that one has ended, or does not want it any more
        raise SystemExit(1)
    arguments, environment, folder = json.loads(said)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    show_command_line(arguments)
    if shared := sys.modules.get("numpy.random"):  # servers must not draw alike; Python sees to its own
        shared.seed()
    sys.argv = [MODULE, *arguments]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
