"""The least program: one actor on the other host, one call."""

import time

import rlinf


class Echo(rlinf.Actor):
    @rlinf.endpoint
    async def echo(self, value: int) -> int:
        return value


async def main(system: rlinf.ActorSystem) -> None:
    group = await system.spawn(Echo, hosts=[1], name="echo")
    assert await group[0].echo(1) == 1
    print(f"ready {time.time()} rlinf {rlinf.__version__}", flush=True)


if __name__ == "__main__":
    rlinf.run(main)
