"""Two machines in one: network namespaces that are joined by a virtual cable and see nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.multi.launch import CPU_ONLY, RUN_MARK, kill_marked


@dataclass
class Machine:
    """One of the two.

    Attributes:
        name: of its namespace.
        address: of its end of the cable.
        interface: that end.
    """

    name: str
    address: str
    interface: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, args: Sequence[str], output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a Python script or module on this machine; standard output and error are appended to a file."""
        own = {**env, RUN_MARK: self.mark, "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": self.interface, **CPU_ONLY}
        command = ["ip", "netns", "exec", self.name, sys.executable, *args]
        with output.open("ab") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **own}
            )

    def switch_off(self) -> None:
        """Kill everything that runs on it."""
        kill_marked(self.mark, signal.SIGKILL)


def missing() -> str | None:
    """Why there can't be two machines here, or None."""
    if shutil.which("ip") is None:
        return "`ip` (iproute2) is not installed"
    name = f"probe{uuid.uuid4().hex[:6]}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "ip", "link", "add", "name", "probe_a", "type", "veth", "peer", "name", "probe_b")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "delete", name)
    return None


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Both, on; afterwards nothing of them is left."""
    mark = uuid.uuid4().hex[:6]
    machines = tuple(Machine(f"lds{mark}{end}", f"10.213.0.{end}", f"v{mark}{end}") for end in (1, 2))
    first, second = machines
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
        cable = ("link", "add", "name", first.interface, "type", "veth", "peer", "name", second.interface)
        _ip("-n", first.name, *cable, "netns", second.name)
        for machine in machines:
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", machine.interface)
            _ip("-n", machine.name, "link", "set", machine.interface, "up")
            _ip("-n", machine.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for machine in machines:
            machine.switch_off()
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", machine.name)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)
