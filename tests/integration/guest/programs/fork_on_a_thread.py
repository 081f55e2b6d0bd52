"""Another thread than the one that trains forks, and the child goes on with that thread alone and leaves."""

import os
import threading

from _training import PATIENCE_S, Training, print_end_of

training = Training()
training.step()
children = []
go = threading.Event()


def fork() -> None:
    go.wait(PATIENCE_S)  # a fork while a thread is being started may be the end of Python
    child = os.fork()
    if child == 0:
        training.step("loss of the child")
        os._exit(8)  # a thread cannot end the process otherwise
    children.append(child)


thread = threading.Thread(target=fork)
thread.start()
go.set()
thread.join()
for child in children:
    print_end_of(child)
training.step()
training.step()
