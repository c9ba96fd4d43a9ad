"""Two hosts on one machine: network namespaces joined by a veth pair. Root only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "veth0"


def missing() -> str:
    """Why there can be no namespaces here; '' when there can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed: no ip"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"epdecode-try-{os.getpid()}"
    child = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if child.returncode:
        return f"network namespaces are not allowed here: {child.stderr.decode().strip()}"
    _ip("netns", "del", name)
    return ""


@dataclass(frozen=True)
class Host:
    """One namespace with an address on the shared wire."""

    name: str
    address: str

    def start(self, command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Each host's own name leads to a loopback address, as it does on a fresh Debian."""
    number = os.getpid()
    hosts = tuple(
        Host(f"epdecode-{number}-{index}", f"10.213.77.{index + 1}") for index in range(2)
    )
    with ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
            stack.callback(_remove_hosts_file, host)
            _hosts_file(host).parent.mkdir(parents=True)
            _hosts_file(host).write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
        first, second = hosts
        _ip("link", "add", INTERFACE, "netns", first.name, "type", "veth",
            "peer", "name", INTERFACE, "netns", second.name)  # fmt: skip
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
        yield first, second


def _hosts_file(host: Host) -> Path:
    """``ip netns exec`` puts it in the place of /etc/hosts."""
    return Path("/etc/netns") / host.name / "hosts"


def _remove_hosts_file(host: Host) -> None:
    shutil.rmtree(_hosts_file(host).parent, ignore_errors=True)
    with suppress(OSError):
        _hosts_file(host).parent.parent.rmdir()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
