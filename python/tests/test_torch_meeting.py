"""Where the ranks of a torch group meet, and who else can get in: torch's TCPStore knows no secret, and
listens on all interfaces."""
import json
import os
import socket
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest

import weft

pytest.importorskip("torch")

PROGRAM = """
import os, sys, warnings
import torch, torch.distributed as dist, weft.torch
from datetime import timedelta
rank = int(sys.argv[1])
{before}
dist.init_process_group("weft", init_method=sys.argv[2] if len(sys.argv) > 2 else "env://", rank=rank, world_size=2, timeout=timedelta(seconds=30))
x = torch.ones(4)
dist.all_reduce(x)
print(x.tolist())
"""


def free_port(host="127.0.0.1"):
    with socket.socket() as s:
        s.bind((host, 0))
        return s.getsockname()[1]


@contextmanager
def ranks(before="", method=None, variables=lambda rank: {}, under=lambda rank: []):
    """Two processes of PROGRAM; yields a function that starts one."""
    package = os.path.dirname(os.path.dirname(weft.__file__))
    base = {k: v for k, v in os.environ.items() if not k.startswith(("WEFT_STORE", "WEFT_JOB", "MASTER_"))}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])}
    started = []

    def start(rank):
        arguments = [str(rank), *([method] if method else [])]
        started.append(subprocess.Popen([*under(rank), sys.executable, "-c", PROGRAM.format(before=textwrap.dedent(before)), *arguments], text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=base | variables(rank)))
        return started[-1]
    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


def run(**options):
    with ranks(**options) as start:
        both = [start(0), start(1)]
        said = [process.communicate(timeout=90) for process in both]
        return [(process.returncode, out, err) for process, (out, err) in zip(both, said)]


def good(results):
    for rank, (code, out, err) in enumerate(results):
        assert code == 0 and out == "[2.0, 2.0, 2.0, 2.0]\n", f"rank {rank}: {code}\n{out}\n{err}"


# All that a rank puts into torch's store is shown.
SPY = """
from weft.torch import meeting
kept = meeting.Table.set
def shown(self, key, value):
    print("STORE", type(self._store).__name__, key, value, file=sys.stderr)
    kept(self, key, value)
meeting.Table.set = shown
"""


def test_torchs_store_gets_no_secret_on_one_host():
    results = run(before=SPY, method=f"tcp://127.0.0.1:{free_port()}")
    good(results)
    place = next(line for line in results[0][2].splitlines() if " place " in line)
    told = json.loads(place.split(" place ")[1])
    assert told["secret"] is None and told["host"] == "127.0.0.1"


def test_where_weft_store_is_set_torchs_store_gets_no_place():
    with weft.StoreServer(weft.Context(), host="127.0.0.1") as server:
        results = run(before=SPY, method=f"tcp://127.0.0.1:{free_port()}", variables=lambda rank: {"WEFT_STORE": f"127.0.0.1:{server.port}"})
    good(results)
    in_torchs = [line for line in results[0][2].splitlines() if line.startswith("STORE PrefixStore")]
    assert [line.split()[2] for line in in_torchs] == ["name"], results[0][2]


def test_rank_0_serves_weft_store_where_nobody_does():
    port = free_port()
    good(run(method=f"tcp://127.0.0.1:{free_port()}", variables=lambda rank: {"WEFT_STORE": f"127.0.0.1:{port}"}))


def test_weft_store_on_one_rank_alone_is_told():
    with weft.StoreServer(weft.Context(), host="127.0.0.1") as server:
        with ranks(method=f"tcp://127.0.0.1:{free_port()}", variables=lambda rank: {"WEFT_STORE": f"127.0.0.1:{server.port}"} if rank else {}) as start:
            start(0)
            _, err = start(1).communicate(timeout=90)
    assert "WEFT_STORE is set on rank 1 and not on rank 0; expected it on all ranks, or on none" in err


def test_weft_store_that_cannot_be_read_is_told():
    for rank, (code, _, err) in enumerate(run(method=f"tcp://127.0.0.1:{free_port()}", variables=lambda rank: {"WEFT_STORE": "nowhere"})):
        assert code != 0 and 'WEFT_STORE is "nowhere"; expected host:port' in err, rank


# A stranger says first where weft's store is: rank 1 does not go there.
@pytest.mark.parametrize("spoofs_host", [False, True])
def test_a_place_off_loopback_is_refused_where_rank_0_is_on_this_host(spoofs_host):
    before = f"""
    from weft.torch import meeting
    kept = meeting.Table.get
    def spoofed(self, key):
        if key == "place":
            return '{{"host": "198.51.100.7", "port": 1, "secret": "s", "off_loopback": true, "transport": "gloo", "local_ranks": 2}}'
        if key == "host/0" and {spoofs_host}:
            return "another host"
        return kept(self, key)
    if rank == 1:
        meeting.Table.get = spoofed
    """
    with ranks(before=before, method=f"tcp://127.0.0.1:{free_port()}") as start:
        start(0)
        _, err = start(1).communicate(timeout=90)
    assert ("the store is said to be at 198.51.100.7:1, but rank 0 is on this host; expected an address on loopback: another program has written to "
            "torch's store") in err


def on_two_hosts():
    """Names of two network namespaces that a cable joins, 10.77.3.1 and 10.77.3.2; None where they cannot
    be made."""
    if os.geteuid() != 0:
        return None
    names = [f"weft-py-{os.getpid()}-{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names] + [f"ip link add wpa{os.getpid()} netns {names[0]} type veth peer name wpb{os.getpid()} netns {names[1]}"]
    for i, (name, end) in enumerate(zip(names, ("wpa", "wpb"))):
        commands += [f"ip -n {name} addr add 10.77.3.{i + 1}/24 dev {end}{os.getpid()}", f"ip -n {name} link set {end}{os.getpid()} up",
                     f"ip -n {name} link set lo up"]
    if any(subprocess.run(command.split(), capture_output=True, check=False).returncode for command in commands):
        remove(names)
        return None
    return names


def remove(names):
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.parametrize("secret", [True, False])
@pytest.mark.parametrize("master", [True, False])
def test_between_hosts_the_secret_of_the_environment_stays_there(secret, master):
    names = on_two_hosts()
    if names is None:
        pytest.skip("network namespaces cannot be made here")
    own = "0123456789abcdef0123456789abcdef"
    try:
        results = run(before=SPY, method="tcp://10.77.3.1:29611", under=lambda rank: ["ip", "netns", "exec", names[rank]],
                      variables=lambda rank: {"WEFT_INTERFACE": f"wp{'ab'[rank]}{os.getpid()}", **({"WEFT_STORE_SECRET": own} if secret else {}),
                                              **({"MASTER_ADDR": "10.77.3.1", "MASTER_PORT": "29611", "RANK": str(rank), "WORLD_SIZE": "2"}
                                                 if master else {})})
    finally:
        remove(names)
    good(results)
    for _, _, err in results:
        assert own not in err
        assert ("whoever reaches MASTER_PORT can join the job" in err) == (not secret)
