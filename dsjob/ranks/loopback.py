"""Keeps what ranks of one machine listen on away from the network. Imports no torch: it is used while torch is being
imported."""

from __future__ import annotations

import socket
import sys
from ipaddress import ip_address
from typing import Any

_RENDEZVOUS = "torch.distributed.rendezvous"


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can reach an address."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def create_server(address: str, port: int) -> socket.socket:
    """A socket that listens for other ranks: on a loopback address alone, else on all interfaces. Raises OSError."""
    if is_loopback(address):
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


def install() -> None:
    """Makes the store of a process group listen on its own address alone if that is a loopback address. torch's listens
    on all interfaces. Called when torch's module for the rendezvous has been imported."""
    module: Any = sys.modules[_RENDEZVOUS]
    make = getattr(module, "TCPStore", None)  # None: a torch without distributed
    if make is None or getattr(make, "is_dsjobs", False):
        return

    def make_store(host_name: str, port: int, *rest: Any, is_master: bool = False, **options: Any) -> Any:
        if is_master and is_loopback(host_name) and "master_listen_fd" not in options:
            try:
                options["master_listen_fd"] = create_server(host_name, port).detach()
            except OSError:  # this process has a store there already, which `multi_tenant` finds; or torch explains it
                pass
        return make(host_name, port, *rest, is_master=is_master, **options)

    make_store.is_dsjobs = True  # type: ignore[attr-defined]
    module.TCPStore = make_store
