"""Ctrl-C, with a thread that is waited for and handlers that run at the end."""

import atexit
import os
import signal
import sys
import threading

from _training import train_alone

interrupted = threading.Event()


def work() -> None:
    interrupted.wait()
    print("the thread ends", flush=True)


def hook(*_: object) -> None:
    print("the hook is called", flush=True)
    interrupted.set()


atexit.register(print, "the handler is called", flush=True)
threading.Thread(target=work).start()
sys.excepthook = hook
train_alone(1)
os.kill(os.getpid(), signal.SIGINT)
