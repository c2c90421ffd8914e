"""The example that users paste: as a script, in a REPL and in a notebook, without a __main__ guard."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from batch_inference.testing import wait_until
from tests.process.conftest import Run, environment

EXAMPLE = """\
import numpy as np
from batch_inference import batching
from batch_inference.batcher.concat_batcher import ConcatBatcher

@batching(batcher=ConcatBatcher(), max_batch_size=32)
class MyModel:
    def __init__(self, k, n):
        self.weights = np.random.randn(k, n).astype("f")
    def predict_batch(self, x):          # x: [batch_size, m, k]
        return np.matmul(x, self.weights)

host = MyModel.host(3, 3)
host.start()
def process_request(x):                  # x: [1, 3, 3]
    return host.predict(x)
print(process_request(np.ones((1, 3, 3), "f")).shape)
host.stop()
"""
ANSWER = "(1, 3, 3)"

# What a person types at the prompt: a block ends with an empty line.
TYPED = EXAMPLE.replace("\nhost = ", "\n\nhost = ").replace("\nprint(", "\n\nprint(")


def test_the_example_runs_as_a_script(run_script: Run) -> None:
    assert run_script(EXAMPLE).stdout == f"{ANSWER}\n"


def test_the_example_runs_as_a_script_that_was_started_with_a_relative_path(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "helper.py").write_text("FACTOR = 3\n")
    (tmp_path / "app" / "main.py").write_text(
        EXAMPLE.replace("import numpy", "import helper\nimport numpy").replace(
            "self.weights)", "self.weights) * helper.FACTOR"
        )
    )
    command = [sys.executable, "app/main.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment())
    assert (done.stdout, done.stderr) == (f"{ANSWER}\n", "")


def test_the_example_runs_from_standard_input_and_from_the_command_line(tmp_path: Path) -> None:
    for arguments, stdin in ([], EXAMPLE), (["-"], EXAMPLE), (["-c", EXAMPLE], ""):
        done = subprocess.run(
            [sys.executable, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env=environment(),
        )
        assert (done.stdout, done.stderr) == (f"{ANSWER}\n", "")


def test_the_example_runs_as_a_module_with_a_main_guard_or_without(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(EXAMPLE)
    (tmp_path / "package" / "guarded.py").write_text(
        EXAMPLE.replace("\nhost = ", "\nif __name__ == '__main__':\n  host = ")
        .replace("\nhost.", "\n  host.")
        .replace("\ndef ", "\n  def ")
        .replace("\nprint", "\n  print")
    )
    for name in "package", "package.guarded":
        command = [sys.executable, "-m", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment())
        assert (done.stdout, done.stderr) == (f"{ANSWER}\n", "")


def test_the_example_runs_in_a_repl(tmp_path: Path) -> None:
    near, far = pty.openpty()
    shell = subprocess.Popen(
        [sys.executable, "-i", "-q"],
        stdin=far,
        stdout=far,
        stderr=far,
        cwd=tmp_path,
        env={**environment(), "TERM": "dumb", "PYTHON_BASIC_REPL": "1", "PYTHON_HISTORY": os.devnull},
        start_new_session=True,
    )
    os.close(far)
    try:
        for line in (TYPED + "exit()\n").splitlines(keepends=True):  # a terminal's line buffer is not endless
            os.write(near, line.encode())
        seen = ""
        while True:
            try:
                seen += os.read(near, 4096).decode()
            except OSError:  # the shell has ended
                break
        assert shell.wait(30) == 0
    finally:
        shell.kill()
        shell.wait()
        os.close(near)
    assert f"\n{ANSWER}" in seen.replace("\r", "") and "Error" not in seen, seen


def test_the_example_runs_in_a_notebook_cell(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [EXAMPLE, "host.start()\nprint(process_request(np.ones((2, 3, 3), 'f')).shape)\nhost.stop()"]
    code = f"""
import nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in {cells!r}])
nbclient.NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
for cell in notebook.cells:
    print(cell.outputs)
"""
    settings = {"HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
        env={**environment(), **settings},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert nbclient and nbformat
    first, second = done.stdout.splitlines()
    assert ANSWER in first and "(2, 3, 3)" in second, done.stdout


SERVER = """\
import numpy as np
import app                              # the class and host.start(), at the top level of a module
print(app.host.predict(np.ones((1, 3, 3), "f")).shape, app.host.statistics().workers[0].restarts)
"""


def test_a_module_that_starts_its_host_at_the_top_level_can_be_imported_by_a_server(
    run_script: Run, tmp_path: Path
) -> None:
    started = EXAMPLE[: EXAMPLE.index("def process_request")]
    (tmp_path / "app.py").write_text(started + "print('imported')\n")
    done = run_script(SERVER)
    assert sorted(done.stdout.splitlines()) == [f"{ANSWER} 0", "imported"], done
    assert done.stderr == "imported\n"  # in the worker, where start() did nothing


def test_a_module_that_predicts_while_it_is_imported_is_told_why_that_fails_in_its_worker(
    run_script: Run, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(EXAMPLE.replace("host.stop()\n", ""))
    done = run_script("import app\n", code=1)
    assert "ModelLoadError" in done.stderr and "imported by its own model's worker process" in done.stderr


def test_a_script_that_ends_without_stop_leaves_nothing_behind(run_script: Run) -> None:
    source = EXAMPLE.replace("host.stop()", "import os; print(os.getpid(), host.statistics().workers[0].pid)")
    line = run_script(source).stdout.splitlines()[-1]
    worker = int(line.split()[1])
    wait_until(lambda: not os.path.exists(f"/proc/{worker}"), 5)
