"""Runs one tritonserver and leaves nothing behind, however its owner ends.

A script of its own (standard library only), started by `server.LocalTriton`. It reads one JSON line from
standard input, starts the command, and writes one JSON line with the pid. The other end of standard input is
the owner's: when it closes (the owner asked for a stop, or died of SIGKILL), the server is stopped. Then what
is left of it goes: Python backend stubs that lost their server, files in /dev/shm, the run's folder. A line
says when the server has ended and what had to be done. It knows nothing of models, ports or readiness.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05
_STUB_GRACE_S = 1.0  # a stub whose server is gone needs a moment to notice by itself


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _die_with_supervisor() -> None:
    # Runs in the new child before exec. The supervisor has one thread, so this means: its process ended.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _children() -> list[int]:
    """Pids of this process's children; as a subreaper it inherits the server's orphans."""
    own = os.getpid()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if int(parent) == own and state != "Z":
            found.append(int(entry.name))
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _wait_for_end(server: subprocess.Popen[bytes], owner: int, wakeup: int) -> bool:
    """Return when the server has ended (False) or the owner closed its end or asked by a signal (True)."""
    while server.poll() is None:
        ready, _, _ = select.select([owner, wakeup], [], [])
        # Whatever comes from the owner, if only an end of file, means stop; SIGTERM says the same.
        if owner in ready or signal.SIGTERM in os.read(wakeup, 512):
            return True
    return False


def _stop(server: subprocess.Popen[bytes], exit_timeout_s: float) -> bool:
    """End the server politely, else with its whole process group; whether force was needed."""
    server.terminate()
    try:
        server.wait(timeout=exit_timeout_s)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        return True


def _clear_orphans() -> int:
    """Wait a moment for stubs to end, then kill what is left; how many that were."""
    deadline = time.monotonic() + _STUB_GRACE_S
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        _reap()
    killed = 0
    while left:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        killed += len(left)
        time.sleep(_POLL_S)
        _reap()
        left = _children()  # children of what was just killed, if any
    return killed


def clear_shared_memory(prefix: str) -> int:
    """Remove the files in /dev/shm whose names start with `prefix`; how many there were."""
    left = list(Path("/dev/shm").glob(f"{prefix}*"))  # noqa: S108 - POSIX shared memory lives there
    for region in left:
        region.unlink(missing_ok=True)
    return len(left)


def _say(**facts: object) -> None:
    try:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
    except OSError:
        # The owner is gone: the work here goes on all the same.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())


def main() -> int:
    """Start the command that standard input describes, outlive it, and clear up."""
    order = json.loads(sys.stdin.readline())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    # Ctrl-C reaches the owner, which decides; its terminal going away shows as the end of standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Path(order["log"]).open("ab") as log:
        server = subprocess.Popen(
            order["command"],
            cwd=order["empty_folder"],
            env=order["env"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_supervisor,  # noqa: PLW1509 - one thread, so safe
            restore_signals=True,
        )
    _say(pid=server.pid)
    owner = sys.stdin.fileno()
    asked = _wait_for_end(server, owner, wakeup)
    forced = _stop(server, order["exit_timeout_s"]) if asked else False
    orphans = _clear_orphans()
    regions = clear_shared_memory(order["shm_prefix"])
    _say(exit_code=server.returncode, forced=forced, orphans_killed=orphans, regions_removed=regions)
    if not asked:
        select.select([owner], [], [])  # the owner still wants to read the log
    shutil.rmtree(order["folder"], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
