"""How the processes of a torch group find each other: the first rank serves a store of weft's, and its
address goes through torch's store, or through that of WEFT_STORE where it is set.

Anybody who reaches torch's TCPStore (MASTER_PORT, on all interfaces, without a secret) reads and writes
its keys. So the secret of WEFT_STORE_SECRET(_FILE) never goes through it, and ranks of one host connect to
no address off loopback. Groups that are made when the default group runs over weft meet in its store."""
import ipaddress
import json
import os
import secrets
import socket
import time
import warnings

import torch.distributed as dist

from .. import errors
from ..context import Context
from ..store import Store, new_secret, secret_from_env
from ..store_server import StoreServer

_contexts = {}  # process id -> Context: a child made by fork() gets its own


def context():
    """The Context of all groups of torch in this process."""
    if os.getpid() not in _contexts:
        _contexts.clear()
        _contexts[os.getpid()] = Context()
    return _contexts[os.getpid()]


def _host():
    """Two words: equal first ones where loopback joins two processes, equal both where they can share
    memory, too."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/net") + " " + os.readlink("/proc/self/ns/pid")


class Place:
    """Where ranks meet: a store, on the rank that serves it its server, and what the serving rank has
    decided for all: the transport of groups whose options name none, and the largest number of ranks on
    one host."""

    def __init__(self, store, server, transport, local_ranks):
        self.store, self.transport, self.local_ranks = store, transport, local_ranks
        self.servers = [server] if server is not None else []

    def close(self):
        self.store.close()
        for server in self.servers:
            server.close()


LOOK = 0.02  # seconds between two looks at a store, whose own waits hear of no signal


class Table:
    """Where ranks leave texts for each other under a name of their meeting: torch's store, or one of
    weft's."""

    def __init__(self, store, name, limit):
        self._store, self._name, self._limit = store, name, limit

    def set(self, key, value):
        self._store.set(f"{self._name}/{key}", value.encode() if isinstance(self._store, Store) else value)

    def get(self, key):
        """None where nobody has set it."""
        key = f"{self._name}/{key}"
        if isinstance(self._store, Store):
            value = self._store.try_get(key)
        else:
            value = self._store.get(key) if self._store.check([key]) else None
        return None if value is None else value.decode()

    def wait(self, key):
        """Keys that another rank sets. A rank that is interrupted meanwhile notifies the others, and so do
        those that it has notified."""
        until, pause = time.monotonic() + (self._limit or float("inf")), 0.001
        while (value := self.get(key)) is None:
            if (interrupted := self.get("interrupted")) is not None:
                rank = int(interrupted)
                raise errors.AbortedError(f"rank {rank} was interrupted while the group was made", ranks=(rank,))
            if time.monotonic() >= until:
                absent = [int(key[5:])] if key.startswith("host/") else []
                raise errors.TimeoutError(f"the making of a group: not finished within {self._limit:g} s: " + (
                    f"rank {absent[0]} did not come" if absent else "rank 0, or one that it waits for, did not come"), ranks=absent)
            time.sleep(pause)
            pause = min(2 * pause, LOOK)
        return value


def _is_loopback(host):
    """Whether all addresses of this name lead to this machine alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(address[4][0].split("%")[0]).is_loopback for address in found)


def _master(torch_store):
    """The host that this rank was given for torch's store; None where that is no TCPStore."""
    while isinstance(torch_store, dist.PrefixStore):
        torch_store = torch_store.underlying_store
    return torch_store.host if isinstance(torch_store, dist.TCPStore) else None


def _place_of_env():
    """Host and port, or file, of WEFT_STORE; None where it is not set, or where rank 0 is to choose the
    port (host:0)."""
    where = os.environ.get("WEFT_STORE")
    if not where:
        return None
    if where.startswith("file://"):
        return where[len("file://"):], None
    host, _, port = where.rpartition(":")
    if not port.isdigit() or not host:
        raise errors.BadArgumentError(f'WEFT_STORE is "{where}"; expected host:port, [IPv6 address]:port or file:///path')
    return (host.strip("[]"), int(port)) if int(port) else None


def _store_of_env(rank, limit):
    """The store of WEFT_STORE, and its server where this rank serves it; None where it is not set."""
    place = _place_of_env()
    if place is None:
        return None, None
    host, port = place
    if port is None:
        return Store.file(host, limit), None
    server, secret = None, secret_from_env() or None
    if rank == 0:
        try:
            server = StoreServer(context(), host=host, port=port, secret=secret)
        except errors.Error:
            # Another process serves it, weft run for one, or the host is not rank 0's: the client says what
            # is wrong.
            pass
    return Store.tcp(host, port, secret, limit), server


def meet(torch_store, rank, size, limit):
    """The Place of `size` processes that share a store of torch's, of which this one is `rank`. Blocks
    until all are there."""
    if size == 1:
        return Place(Store.local(), None, "shm", 1)
    # A store may outlive a group, and with it the keys of earlier meetings: each rank counts those of this
    # size that it has been to.
    table = Table(torch_store, f"weft/{size}/{torch_store.add(f'weft/{size}/meetings/{rank}', 1)}", limit)
    own, server = _store_of_env(rank, limit)
    try:
        inner = _inner_table(table, own, rank, limit)
        try:
            place = _meet(inner, rank, size, limit, _master(torch_store))
        except BaseException as why:
            if not isinstance(why, Exception):  # KeyboardInterrupt
                inner.set("interrupted", str(rank))
            raise
    finally:
        if own is not None:
            own.close()
    if server is not None:
        place.servers.append(server)  # others may still read from it
    return place


def _inner_table(table, own, rank, limit):
    """The table in the store of WEFT_STORE, under a name at random that rank 0 puts into torch's: `own`
    may serve several jobs of torch, and each of them several meetings."""
    if rank == 0:
        name = secrets.token_hex(16)
        table.set("name", f"{name} {'torch' if own is None else 'weft'}")
    else:
        name, where = table.wait("name").split()
        if where != ("torch" if own is None else "weft"):
            raise errors.MismatchError(f"the making of a group: WEFT_STORE is {'not ' if own is None else ''}set on rank {rank} and "
                                       f"{'' if own is None else 'not '}on rank 0; expected it on all ranks, or on none", ranks=(rank,))
    return table if own is None else Table(own, f"torch/{name}", limit)


def _all_on_this_host(master):
    """The fact that this rank knows by itself, and not from a store: that all ranks are on its host."""
    sizes = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return (master is not None and _is_loopback(master)) or (None not in sizes and sizes[0] == sizes[1])


def _meet(table, rank, size, limit, master):
    table.set(f"host/{rank}", _host())
    if rank != 0:
        told = json.loads(table.wait("place"))
        if "error" in told:
            raise errors.SystemError(f"rank 0 could not serve a store: {told['error']}", ranks=(0,))
        on_this_host = table.wait("host/0").split()[0] == _host().split()[0] or _all_on_this_host(master)
        return _go_to(told, on_this_host, limit)
    hosts = [table.wait(f"host/{r}") for r in range(size)]
    try:
        told, server = _serve(hosts, master)
    except Exception as error:
        table.set("place", json.dumps({"error": str(error)}))
        raise
    table.set("place", json.dumps(told))
    secret = secret_from_env() or told["secret"] if told["off_loopback"] else None
    return Place(Store.tcp(told["host"], told["port"], secret, limit), server, told["transport"], told["local_ranks"])


NO_SECRET = ("weft.torch: the ranks are on several hosts, and neither WEFT_STORE_SECRET_FILE nor WEFT_STORE_SECRET is set: the secret of "
             "this job's store goes through torch's store, so that whoever reaches MASTER_PORT can join the job; set the variable on all hosts")


def _serve(hosts, master):
    """Rank 0's server, and what the other ranks must know of it."""
    on_one_host = len({host.split()[0] for host in hosts}) == 1
    host, own, shared = "127.0.0.1", None, None
    if not on_one_host:
        host = socket.gethostbyname(os.environ.get("MASTER_ADDR") or master or socket.gethostname())
        if _is_loopback(host):
            raise errors.BadArgumentError(f"the ranks are on several hosts, but rank 0's address is {host}; expected MASTER_ADDR to be an "
                                          "address of rank 0's host that the others reach")
        own = secret_from_env() or None
        if own is None:
            warnings.warn(NO_SECRET, RuntimeWarning, stacklevel=2)
            shared = new_secret()
    server = StoreServer(context(), host=host, secret=own or shared)
    transport = "shm" if len(set(hosts)) == 1 and not os.environ.get("WEFT_BACKEND") else "auto"
    return {"host": host, "port": server.port, "off_loopback": not on_one_host, "secret": shared, "transport": transport,
            "local_ranks": max(map(hosts.count, hosts))}, server


def _go_to(told, on_this_host, limit):
    """The Place that rank 0 has named, or somebody who could write to the table. This rank's own knowledge
    has precedence."""
    secret = None
    if on_this_host:
        if not _is_loopback(told["host"]):
            raise errors.MismatchError(f"the making of a group: the store is said to be at {told['host']}:{told['port']}, but rank 0 is on this "
                                       "host; expected an address on loopback: another program has written to torch's store", ranks=(0,))
    else:
        secret = secret_from_env() or None
        if secret is None and told["secret"] is None:
            raise errors.BadArgumentError("WEFT_STORE_SECRET_FILE or WEFT_STORE_SECRET is set on rank 0 and not on this rank; expected the same "
                                          "secret on all hosts")
        if secret is None:
            warnings.warn(NO_SECRET, RuntimeWarning, stacklevel=2)
            secret = told["secret"]
    return Place(Store.tcp(told["host"], told["port"], secret, limit), None, told["transport"], told["local_ranks"])
