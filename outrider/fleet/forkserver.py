"""The fork server: imports all modules of servers once, and forks servers, which then start without import times.

`outrider.fleet.forking` runs it as `python -P -m outrider.fleet.forkserver FD` and sends requests over the other end of
that socket; when the other end is closed, this process ends. An intermediate child forks each server and ends at once,
so the requesting process adopts the server: it receives the server's exit status, and the fork server may end earlier.
The fork server of `multiprocessing` has one environment and one output for all that it forks, and they end with it.
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

from outrider.fleet import process_env
from outrider.fleet.command_line import MODULE, show_command_line

READY = b"ready"  # the first message; each later message is the pid of a requested server
SERVERS = ("outrider.cli.main", "router.server", "verifier_svc.server", "drafter_svc.server")


def main() -> None:
    """Fork servers until the starting process ends. In each server, run it and return."""
    starter = socket.socket(fileno=int(sys.argv[1]))
    process_env.set_variables(1)  # a server sets its own number of threads before it computes
    for name in SERVERS:
        with suppress(ImportError):  # servers may be not installed
            import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # a fork keeps only the calling thread
        raise SystemExit(f"{threads} threads run after the imports, so nothing can be forked")
    gc.freeze()  # without it, a server's first collection would write to, and so copy, all shared pages
    starter.send(READY)
    if (order := _fork(starter)) is not None:
        _run_server(order)


def _fork(starter: socket.socket) -> int | None:
    """Fork a server for each request. Return the descriptor of its order in a server, None in this process."""
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


def _run_server(order: int) -> None:
    """Read the command line, environment and folder of this server, and run it as if it had been started with them."""
    with open(order, encoding="utf-8") as file:  # the starter writes the order once it has adopted this process
        content = file.read()
    if not content:  # the starter has ended, or does not want the server any more
        raise SystemExit(1)
    arguments, environment, folder = json.loads(content)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    show_command_line(arguments)
    if shared := sys.modules.get("numpy.random"):  # servers need different seeds; Python reseeds `random` itself
        shared.seed()
    sys.argv = [MODULE, *arguments]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
