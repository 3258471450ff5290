"""Search-R1 on facts about invented people: a model that knows nothing learns to look things up.

    python examples/search_r1.py            # a minute on a CPU; pip install 'rlinf[search]'
    python launch.py --config configs/agents/search-r1-tiny.yaml            # for longer

Asked `home of mira?`, it writes `<search>mira</search>`, reads `<information>mira lives in oslen
</information>`, and answers `<answer>oslen</answer>`. You will see that it searches more, and is right more often.
"""

import json
import random
from pathlib import Path

import rlinf
from rlinf.agents.search import search_r1

KINDS = {
    "home of {who}?": "{who} lives in {what}",
    "food of {who}?": "{who} eats {what}",
    "friend of {who}?": "{who} likes {what}",
}


def facts(count=1000, seed=0):
    """People and what is known about them: (question, fact, who, what)."""
    draw = random.Random(seed)

    def word():
        return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(2))

    people = sorted({word() for _ in range(2 * count)})
    draw.shuffle(people)
    for who in people[:count]:
        (question, fact), what = draw.choice([*KINDS.items()]), word()
        yield question.format(who=who), fact.format(who=who, what=what), who, what


def rows(known):
    """Questions, and what the warm-up imitates: guesses, and every other time a search."""
    for number, (question, fact, who, what) in enumerate(known):
        found = f"<search>{who}</search><information>{fact}</information><answer>{what}</answer>"
        yield {"prompt": question, "answer": what, "response": f"<answer>{who}</answer>" if number % 2 else found}


TRAIN, HELD_OUT = [*rows([*facts()][:800])], [*rows([*facts()][800:])]  # a fifth of the people are never asked about
CORPUS = "outputs/facts.jsonl"


async def agent(task, llm):
    shown = {"documents": "{text}", "information": "<information>{documents}</information>", "invalid": "!"}
    return await search_r1(task, llm, retriever=CORPUS, topk=1, turns=2, **shown)


MODEL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def told(step, metrics):
    right, calls = metrics["reward/mean"], metrics["episodes/calls"]
    print(f"step {step:2}   right {right:4.0%} {'#' * round(25 * right):25}   turns per question {calls:.2f}")


if __name__ == "__main__":
    Path("outputs").mkdir(exist_ok=True)
    Path(CORPUS).write_text("".join(json.dumps({"text": fact}) + "\n" for _, fact, _, _ in facts()))
    rlinf.train(
        MODEL,
        data=TRAIN,
        agent=agent,
        tokenizer={"characters": "abcdefghijklmnopqrstuvwxyz <>/?!"},
        algorithm="grpo_clip_higher",
        steps=6,
        sft={"steps": 300, "batch_size": 32, "lr": 3e-3},
        prompts_per_step=16,
        epochs=2,
        lr=5e-4,
        max_new_tokens=32,
        run_dir="outputs/search_r1",
        callbacks=[told],
    )
