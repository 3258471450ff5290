"""An agent with a tool: a model that mostly gives up learns to ask the calculator, and to say what it read.

    python examples/calculator.py            # half a minute on a CPU; pip install 'rlinf[agents]'
    python launch.py --config configs/agents/calculator.yaml            # for longer

Asked `47*63?`, it may write `=47*63`, read `2961.`, and answer `2961`. Its warm-up showed it to give up more often than
to call. You will see that it calls more and more, and is right more often.
"""

import random
import re

import rlinf
from rlinf.agents.tools.arithmetic import calculator
from rlinf.agents.tools.formats import CallFormat, Read
from rlinf.agents.tools.tool import Tools

TOOLS = Tools([calculator])  # a model with a chat template that describes tools gets them by llm.chat(…, tools=…)


async def agent(task, llm, turns=4):
    messages = list(task.row["messages"])
    for _ in range(turns):
        answer = await llm.chat(messages)
        if not answer.calls:
            return float(answer.text == task.answer)
        messages += [answer.message, *(short(result) for result in await TOOLS.run(answer))]
    return 0.0


def short(result):
    """An error as one sign: the alphabet has no letters."""
    return {**result, "content": "!"} if result["content"].startswith("Error") else result


class Equals(CallFormat):
    opens = re.compile("=")  # calls as a tiny model can write them: `=` and an expression

    def read(self, text, match):
        return Read(len(text), (("calculator", {"expression": text[match.end() :]}),))


def rows(count, seed):
    """Problems, and what the warm-up imitates: every third time the calculator. `<eos>` ends a turn of the model."""
    draw = random.Random(seed)
    for number in range(count):
        asked = f"{draw.randint(10, 99)}{draw.choice('+-*')}{draw.randint(10, 99)}"
        answer = str(eval(asked))
        response = "?" if number % 3 else f"={asked}<eos>{answer}.{answer}"
        yield {"prompt": asked, "answer": answer, "response": response}


TRAIN, HELD_OUT = [*rows(20_000, seed=1)], [*rows(200, seed=2)]
TEMPLATE = """{% for m in messages %}{{ m.content + {"user": "?", "tool": "."}.get(m.role, eos_token) }}{% endfor %}"""
MODEL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def told(step, metrics):
    right, calls = metrics["reward/mean"], metrics["episodes/calls"]
    print(f"step {step:2}   right {right:4.0%} {'#' * round(25 * right):25}   answers per problem {calls:.2f}")


if __name__ == "__main__":
    rlinf.train(
        MODEL,
        data=TRAIN,
        agent=agent,
        tokenizer={"characters": "0123456789+-*=?.!"},
        algorithm="grpo_clip_higher",
        steps=12,
        sft={"steps": 150, "batch_size": 128, "lr": 2e-3},
        **{"agent.call_format": "__main__.Equals", "data.chat": True, "data.chat_template": TEMPLATE},
        prompts_per_step=32,
        epochs=2,
        lr=7e-4,
        max_new_tokens=10,
        run_dir="outputs/calculator",
        callbacks=[told],
    )
