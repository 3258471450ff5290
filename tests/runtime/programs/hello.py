"""The smallest program."""

import rlinf
from rlinf import Actor, endpoint


class Echo(Actor):
    @endpoint
    async def echo(self, value):
        return value, self.rank, self.host


async def main(system):
    group = await system.spawn(Echo, name="echo")
    print(await group.echo("hello"))


if __name__ == "__main__":
    rlinf.run(main)
