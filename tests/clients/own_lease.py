#!/usr/bin/env python3
"""A worker with `lease: own`, on the unmodified grpcio package: it asks for its lease by its own name, and keeps it.

    own_lease.py SOCKET NAME MIB
"""

import sys
import time

from grpc_client import MIB, Context

if __name__ == "__main__":
    context = Context(sys.argv[1], "")
    size = int(sys.argv[3]) * MIB
    lease = context.create(tenant=sys.argv[2], min_bytes=size, max_bytes=size, term={"seconds": 30})
    print(f"granted {lease.held_bytes}", flush=True)
    while True:
        time.sleep(5)
        context.call("LeaseService", "RenewLease", name=lease.name, boot_id=lease.boot_id, generation=lease.generation)
