"""Where the ranks of a job meet: at one address, and without running what others write there.

torchrun's own stores listen on all interfaces, and its agents unpickle what anyone writes there. These listen
on the address of ``--rdzv-endpoint`` only, as does gloo, and agents accept no types but those of their state.
There is no password: whoever reaches a store can still end the job.
"""

from __future__ import annotations

import os
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.common import is_loopback
from megatron_fspo.rollout.links import address_towards, host_store
from megatron_fspo.weights.safe_pickle import Unpickler

BACKEND = "one_address"
_TIMEOUT = timedelta(seconds=60)
_NODE_0_TIMEOUT = timedelta(seconds=600)  # it checks the arguments before it listens
_TYPES = {
    *((dynamic_rendezvous.__name__, name) for name in ("_RendezvousState", "_NodeDesc")),
    *(("datetime", name) for name in ("datetime", "timedelta", "timezone")),
}


class _Backend(C10dRendezvousBackend):
    name = BACKEND

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, object] | None:
        decoded = super()._decode_state(base64_state)
        try:
            if decoded is not None:
                Unpickler(decoded[0], _TYPES).load()
        except Exception as error:  # a damaged pickle raises nearly anything
            raise RendezvousStateError(f"not a state of the job's nodes: {error}") from error
        return decoded


def meet(params: RendezvousParameters) -> RendezvousHandler:
    """Return the handler with which this node's torchrun meets the others.

    Raises:
        InputError: node 0 would listen where other nodes do not reach it.
        TrainingError: node 0 does not answer, or cannot listen at the endpoint.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29500)
    try:
        if params.get_as_bool("is_host", params.max_nodes == 1):
            store = host_store(host, port, timeout=_TIMEOUT)
            address = store.host
            if params.max_nodes > 1 and is_loopback(address) and not is_loopback(host):
                raise InputError(f"MASTER_ADDR: {host} is {address} here, which no other node reaches")
        else:
            store = TCPStore(host, port, timeout=_NODE_0_TIMEOUT)
            store.set_timeout(_TIMEOUT)
            address = address_towards(host, port)
    except OSError as error:  # as with the name of a pod that is just replaced
        raise TrainingError(f"{host}:{port}: node 0 cannot listen there: {error.strerror or error}") from None
    except DistError as error:
        raise TrainingError(f"{host}:{port}: node 0 does not answer: {str(error).splitlines()[0]}") from None
    params.local_addr = params.local_addr or address
    for name, addresses in psutil.net_if_addrs().items():
        if address in (found.address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    handler = dynamic_rendezvous.create_handler(store, _Backend(store, params.run_id), params)
    # The store of the ranks, on the first of the nodes.
    handler._create_tcp_store_server = lambda ip, port: host_store(ip, port, timeout=_TIMEOUT)  # type: ignore
    return handler
