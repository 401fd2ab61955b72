"""How the processes of a torch group find each other: the first rank serves a store of weft's, and its address goes through torch's.

Groups that are made when the default group runs over weft meet in its store."""
import json
import os
import socket

from .. import errors
from ..context import Context
from ..store import Store, StoreServer, new_secret

_contexts = {}  # process id -> Context: a child made by fork() gets its own


def context():
    """The Context of all groups of torch in this process."""
    if os.getpid() not in _contexts:
        _contexts.clear()
        _contexts[os.getpid()] = Context()
    return _contexts[os.getpid()]


def _host():
    """Two words: equal first ones where loopback joins two processes, equal both where they can share memory, too."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/net") + " " + os.readlink("/proc/self/ns/pid")


class Place:
    """Where ranks meet: a store, on the rank that serves it its server, and what the serving rank has decided for all: the transport of groups whose
    options name none, and the largest number of ranks on one host."""

    def __init__(self, store, server, transport, local_ranks):
        self.store, self.server, self.transport, self.local_ranks = store, server, transport, local_ranks

    def close(self):
        self.store.close()
        if self.server is not None:
            self.server.close()


def meet(torch_store, rank, size, limit):
    """The Place of `size` processes that share a store of torch's, of which this one is `rank`. Blocks until all are there."""
    if size == 1:
        return Place(Store.local(), None, "shm", 1)
    # A store may outlive a group, and with it the keys of earlier meetings: each rank counts those of this size that it has been to.
    meeting = f"weft/{size}/{torch_store.add(f'weft/{size}/meetings/{rank}', 1)}"
    torch_store.set(f"{meeting}/host/{rank}", _host())
    if rank != 0:
        told = json.loads(torch_store.get(f"{meeting}/place"))
        if "error" in told:
            raise errors.SystemError(f"rank 0 could not serve a store: {told['error']}", ranks=(0,))
        return Place(Store.tcp(told["host"], told["port"], told["secret"], limit), None, told["transport"], told["local_ranks"])
    hosts = [torch_store.get(f"{meeting}/host/{r}").decode() for r in range(size)]
    try:
        loopback = len({host.split()[0] for host in hosts}) == 1
        host = "127.0.0.1" if loopback else socket.gethostbyname(os.environ.get("MASTER_ADDR") or socket.gethostname())
        secret = None if loopback else new_secret()
        server = StoreServer(context(), host=host, secret=secret)
        transport = "shm" if len(set(hosts)) == 1 and not os.environ.get("WEFT_BACKEND") else "auto"
        told = {"host": host, "port": server.port, "secret": secret, "transport": transport, "local_ranks": max(map(hosts.count, hosts))}
    except Exception as error:
        torch_store.set(f"{meeting}/place", json.dumps({"error": str(error)}))
        raise
    torch_store.set(f"{meeting}/place", json.dumps(told))
    return Place(Store.tcp(host, server.port, secret, limit), server, transport, told["local_ranks"])
