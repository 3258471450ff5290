"""A service that learns from its users while it serves them: each accepts or rejects what it is offered, later.

    python examples/online_feedback.py            # half a minute on a CPU

The users are simulated: one types a digit, and likes completions of two digits that go up from there. Nobody tells the
model; it begins as a random one. You will see the share of accepted answers rise, and how long an answer takes.
"""

import asyncio
import random
import time

import rlinf

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def accepts(typed, completion):
    return len(completion) == 2 and typed < completion[0] < completion[1]


async def user(service, luck, seen, until):
    """Asks, thinks, says yes or no, and asks again."""
    while service.counts.trained < until:
        typed = luck.choice("01234")
        start = time.perf_counter()
        answer = await service.complete(typed)
        waited = time.perf_counter() - start
        await asyncio.sleep(luck.expovariate(1 / 0.1))  # meanwhile others are served, and the policy learns
        liked = accepts(typed, answer.text)
        service.feedback(answer.id, float(liked))
        seen.append((liked, waited))


async def main(answers=4_000, users=64, seed=0, run_dir="outputs/online", resume="never"):
    """Serve until so many answers were learned from; returns (liked, seconds waited) of each answer."""
    seen = []
    async with (
        rlinf.Session.local(
            model=MODEL,
            tokenizer={"characters": "0123456789"},
            algorithm={"name": "reinforce_pp", "kl": None},  # one answer is compared with the batch, not with a group
            lr=5e-3,
            max_new_tokens=2,
            seed=seed,
            run_dir=run_dir,
            resume=resume,
        ) as session,
        session.online(batch=96, max_age=4) as service,
    ):
        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(service, random.Random(1000 * seed + number), seen, answers))
        counts = service.counts
    return seen, counts


if __name__ == "__main__":
    seen, counts = asyncio.run(main())
    tenth = len(seen) // 10
    shares = [sum(liked for liked, _ in seen[k : k + tenth]) / tenth for k in range(0, 10 * tenth, tenth)]
    waits = sorted(waited for _, waited in seen)
    print("accepted, by tenths of all answers:", " ".join(f"{share:.2f}" for share in shares))
    median, late = (1e3 * waits[len(waits) * share // 100] for share in (50, 95))
    print(f"an answer took {median:.0f} ms (median), {late:.0f} ms (p95)")
    print(counts)
