"""Models and policies for the tests of overload. Workers import this module, so it imports nothing heavy."""

import math
import os
import time
from pathlib import Path


class Gated:
    """Twice its input. Notes each batch's values in `seen`, then waits until `gate` is there; notes its close()."""

    def __init__(self, folder, seconds=0.0):
        self.folder = Path(folder)
        self.seconds = seconds

    def predict_batch(self, x):
        note(self.folder / "seen", " ".join(str(value) for value in x[:, 0]))
        while not (self.folder / "gate").exists():
            time.sleep(0.002)
        time.sleep(self.seconds)
        return x * 2

    def close(self):
        note(self.folder / "closed", os.getpid())


class WaitsForEver:
    """A user's policy: only a limit or a full batch ends its wait."""

    def arrived(self, time, size):
        pass

    def ran(self, size, seconds):
        pass

    def completed(self, time, requests):
        pass

    def wait(self, queue, now):
        return math.inf


class Notes(WaitsForEver):
    """A user's policy that runs at once, and notes what it is told."""

    def __init__(self, path):
        self.path = path

    def arrived(self, time, size):
        note(self.path, f"arrived {time} {size}")

    def ran(self, size, seconds):
        note(self.path, f"ran {size} {seconds}")

    def completed(self, time, requests):
        note(self.path, f"completed {time} {requests}")

    def wait(self, queue, now):
        note(self.path, f"wait {queue.oldest} {queue.count} {queue.size} {queue.deadline is not None}")
        return 0.0


def note(path, text):
    with open(path, "a") as file:
        file.write(f"{text}\n")
