"""``python -m epdecode.launch.route HOST``: this node's interface and address towards HOST.

Prints ``<interface> <IPv4 address>``. GLOO_SOCKET_IFNAME, when set, decides the interface.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping

import psutil

from epdecode.errors import EnvironmentFault, UserError, nearest

Interfaces = Mapping[str, list[str]]
"""Interface name -> its IPv4 addresses."""

USAGE = "usage: python -m epdecode.launch.route HOST (the first node)"


def interfaces_here() -> dict[str, list[str]]:
    """All interfaces of this node."""
    return {
        name: [each.address for each in addresses if each.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }


def find_route(host: str, named: str, interfaces: Interfaces) -> tuple[str, str]:
    """(interface, address) of this node towards ``host``, over ``named`` when that is not empty.

    Raises EnvironmentFault, with the interfaces there are: ``named`` is none of them or has no
    address; ``host`` cannot be resolved, or is a loopback address while no interface is named.
    """
    listed = ", ".join(f"{name} ({', '.join(a) or 'no IPv4'})" for name, a in interfaces.items())
    if named:
        if not interfaces.get(named):
            raise EnvironmentFault(
                f"GLOO_SOCKET_IFNAME={named!r} is no interface with an IPv4 address of "
                f"{socket.gethostname()}{nearest(named, interfaces)}; interfaces: {listed}"
            )
        return named, interfaces[named][0]
    address = _address_towards(host, listed)
    name = next((each for each, has in interfaces.items() if address in has), None)
    if name is None or ipaddress.ip_address(address).is_loopback:
        raise EnvironmentFault(
            f"{host} is a loopback address on {socket.gethostname()}, so the other nodes cannot "
            f"reach it: name the first node by an address that they reach (EPDECODE_MASTER_ADDR), "
            f"or set GLOO_SOCKET_IFNAME; interfaces: {listed}"
        )
    return name, address


def _address_towards(host: str, listed: str) -> str:
    """The source address the kernel takes towards ``host``; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentFault(
            f"{host} cannot be reached from {socket.gethostname()}: {error}; interfaces: {listed}"
        ) from error


def main(arguments: list[str]) -> int:
    """Print the route, or one line that says why there is none."""
    if len(arguments) != 1:
        sys.stderr.write(f"{USAGE}\n")
        return 2
    try:
        name, address = find_route(
            arguments[0], os.environ.get("GLOO_SOCKET_IFNAME", ""), interfaces_here()
        )
    except UserError as error:
        sys.stderr.write(f"launch: error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{name} {address}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
