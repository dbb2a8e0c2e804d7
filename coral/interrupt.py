"""Ctrl-C and SIGTERM: stop at once, with everything that was started.

A terminal sends the interrupt to every process of the command: Prefect's temporary server dies
with it, and a flow that then tries to report its end waits for minutes. Python's own handlers run
only after a solver's call returns. So a thread waits for the signal and ends the process. Every
write is one database transaction: stopping anywhere leaves nothing half-written.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import psutil

MESSAGE = "coral: interrupted; what was committed is kept, run it again to go on"


def stop_on_signals() -> None:
    """Exit 130 on SIGINT and 143 on SIGTERM, taking child processes along."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # so that the signal reaches the wakeup fd
    threading.Thread(target=_wait, args=(receiver, sender), daemon=True).start()


def _wait(receiver: socket.socket, sender: socket.socket) -> None:
    while True:
        for number in receiver.recv(64):
            if number in (signal.SIGINT, signal.SIGTERM):
                _stop(number)


def _stop(number: int) -> None:
    show_cursor = "\033[?25h\n" if sys.stderr.isatty() else ""  # a progress bar hid it
    os.write(sys.stderr.fileno(), f"{show_cursor}{MESSAGE}\n".encode())
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(128 + number)
