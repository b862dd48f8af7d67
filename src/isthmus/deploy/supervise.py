"""Keeps a command running: a SuperNode gives up where its link still counts the one before as online, for up to a minute after a crash."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

PAUSE = 3.0


def main() -> int:
    """``python -m isthmus.deploy.supervise COMMAND...``: start it again after every failure, until it ends well or we are told to stop."""
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        if child is not None:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, stop)
    while True:
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
        code = child.wait()
        if not code:
            return 0
        print(f"ended with code {code}; again in {PAUSE:g} s", file=sys.stderr, flush=True)
        time.sleep(PAUSE)


if __name__ == "__main__":
    sys.exit(main())
