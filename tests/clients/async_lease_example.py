import asyncio
import mmap

import cotenant

cache = mmap.mmap(-1, 70 << 20)  # memory that this program can free
cache.write(b"\1" * len(cache))


async def shrink(target_bytes, reason):  # runs in the event loop
    print("shrink to", target_bytes, "since", reason, flush=True)
    if not cache.closed:
        cache.close()


async def main():
    async with cotenant.async_lease("vision", min="80MiB", max="140MiB", lease_class="batch", term=2, on_shrink=shrink) as lease:
        print("holds", lease.held_bytes, flush=True)
        await lease.wait()
    print("over:", lease.ended, flush=True)


asyncio.run(main())
