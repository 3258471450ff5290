"""Casts, the runtime's calls without a reply, keep their place among calls, to other hosts and to one's own alike."""

from rlinf import Actor, endpoint


class Notes(Actor):
    async def setup(self):
        self.noted = []

    @endpoint
    async def by_call(self, what):
        self.noted.append(what)

    def by_cast(self, what):
        self.noted.append(what)

    @endpoint
    async def all(self):
        return self.noted


async def test_a_cast_does_not_overtake_a_call_wherever_its_receiver_is(system):
    for host in range(2):
        (notes,) = await system.spawn(Notes, hosts=[host], name=f"notes{host}")
        calls = []
        for number in range(0, 10, 2):
            calls.append(notes.by_call(number))
            system._host.cast(host, notes._actor, "by_cast", number + 1)
        for call in calls:
            await call
        assert await notes.all() == list(range(10))


async def test_a_cast_to_oneself_does_not_run_inside_the_code_that_makes_it(system):
    (notes,) = await system.spawn(Notes, hosts=[0], name="notes")
    system._host.cast(0, notes._actor, "by_cast", 1)
    assert system._host.cells[notes._actor].actor.noted == []
    assert await notes.all() == [1]
