"""How the processes of a torch group find each other: the first rank serves a store of weft's, and its address goes through torch's.

Groups that are made when the default group runs over weft meet in its store."""
import json
import os
import socket
import time

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


LOOK = 0.02  # seconds between two looks at a store of torch's, whose own waits hear of no signal


def _await(torch_store, meeting, key, limit):
    """What another rank puts there. A rank that is interrupted meanwhile tells the others, and so do those that it has told."""
    until, pause = time.monotonic() + (limit or float("inf")), 0.001
    while not torch_store.check([f"{meeting}/{key}"]):
        if torch_store.check([f"{meeting}/interrupted"]):
            rank = int(torch_store.get(f"{meeting}/interrupted"))
            raise errors.AbortedError(f"rank {rank} was interrupted while the group was made", ranks=(rank,))
        if time.monotonic() >= until:
            absent = [int(key[5:])] if key.startswith("host/") else []
            raise errors.TimeoutError(f"the making of a group: not finished within {limit:g} s: " + (
                f"rank {absent[0]} did not come" if absent else "rank 0, or one that it waits for, did not come"), ranks=absent)
        time.sleep(pause)
        pause = min(2 * pause, LOOK)
    return torch_store.get(f"{meeting}/{key}")


def meet(torch_store, rank, size, limit):
    """The Place of `size` processes that share a store of torch's, of which this one is `rank`. Blocks until all are there."""
    if size == 1:
        return Place(Store.local(), None, "shm", 1)
    # A store may outlive a group, and with it the keys of earlier meetings: each rank counts those of this size that it has been to.
    meeting = f"weft/{size}/{torch_store.add(f'weft/{size}/meetings/{rank}', 1)}"
    try:
        return _meet(torch_store, meeting, rank, size, limit)
    except BaseException as why:
        if not isinstance(why, Exception):  # KeyboardInterrupt
            torch_store.set(f"{meeting}/interrupted", str(rank))
        raise


def _meet(torch_store, meeting, rank, size, limit):
    torch_store.set(f"{meeting}/host/{rank}", _host())
    if rank != 0:
        told = json.loads(_await(torch_store, meeting, "place", limit))
        if "error" in told:
            raise errors.SystemError(f"rank 0 could not serve a store: {told['error']}", ranks=(0,))
        return Place(Store.tcp(told["host"], told["port"], told["secret"], limit), None, told["transport"], told["local_ranks"])
    hosts = [_await(torch_store, meeting, f"host/{r}", limit).decode() for r in range(size)]
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
