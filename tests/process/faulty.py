"""Models for the tests of deaths. Workers import this module, so it imports nothing heavy."""

import os
import signal
import sys
import threading
import time

import numpy as np

from batch_inference.testing import Doubles

EXIT, SEGFAULT, SYS_EXIT, INTERRUPT, EXIT_WITH_THREAD, BABBLE, SAY = -1, -2, -3, -4, -5, -6, -7


class Falls(Doubles):
    """Ends its process in the way that a request asks for; counts the tries in the file `tries`, a line each."""

    def __init__(self, tries):
        super().__init__()
        self.tries = tries

    def predict_batch(self, x):
        for way in (EXIT, SEGFAULT, SYS_EXIT, INTERRUPT, EXIT_WITH_THREAD, BABBLE):
            if (x == way).any():
                with open(self.tries, "a") as file:
                    file.write(f"{way}\n")
                print(f"last words before {way}", file=sys.stderr)
                self.fall(way)
        return super().predict_batch(x)

    def fall(self, way):
        if way == EXIT:
            os._exit(7)
        elif way == SEGFAULT:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif way == INTERRUPT:
            raise KeyboardInterrupt
        elif way == EXIT_WITH_THREAD:
            threading.Thread(target=threading.Event().wait).start()
        elif way == BABBLE:
            for _ in range(30):
                print("模型坏了😀" * 1000, file=sys.stderr)
            os._exit(8)
        sys.exit(5)


class LoadsWithThread:
    """Starts a thread that never ends, and then fails to load."""

    def __init__(self):
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("no weights")

    def predict_batch(self, x):
        return x


class Reloads(Doubles):
    """Marks each load with a file in `folder`; the second load never ends."""

    def __init__(self, folder):
        super().__init__()
        number = len(os.listdir(folder)) + 1
        with open(os.path.join(folder, f"{number} {os.getpid()}"), "w"):
            pass
        while number == 2:
            time.sleep(0.01)


class Large:
    """A reply of `size` bytes for each row, all of them its number."""

    def __init__(self, size):
        self.size = size

    def predict_batch(self, numbers):
        return [np.full(self.size, number[0] % 251, np.uint8) for number in numbers]


class Closes(Doubles):
    """Appends a line to `file` when it is closed."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def close(self):
        with open(self.file, "a") as file:
            file.write("closed\n")


class Forks(Doubles):
    """Forks two generations of processes that would live for ever, and tells their ids in `file`."""

    def __init__(self, file):
        super().__init__()
        if os.fork() == 0:
            grandchild = os.fork()
            if grandchild:
                with open(f"{file}.new", "w") as out:
                    out.write(f"{os.getpid()} {grandchild}")
                os.rename(f"{file}.new", file)
            while True:
                time.sleep(1)
