import mmap

import cotenant

cache = mmap.mmap(-1, 70 << 20)  # memory that this program can free
cache.write(b"\1" * len(cache))


def shrink(target_bytes, reason):
    print("shrink to", target_bytes, "since", reason, flush=True)
    if not cache.closed:
        cache.close()


with cotenant.lease("vision", min="80MiB", max="140MiB", lease_class="batch", term=2, on_shrink=shrink) as lease:
    print("holds", lease.held_bytes, flush=True)
    lease.wait()  # your work goes here; this example waits for the end of the lease
print("over:", lease.ended, flush=True)
