"""Handlers that run at the end, in their order, the last of which exits."""

import atexit
import sys
import threading

from _training import train_alone

atexit.register(sys.exit, 3)
atexit.register(print, "second", flush=True)
atexit.register(print, "first", flush=True)
train_alone()
go_on = threading.Event()
threading.Thread(target=lambda: (go_on.wait(), print("thread", flush=True))).start()
go_on.set()
