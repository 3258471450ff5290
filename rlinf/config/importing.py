"""Dotted paths in configuration: `package.module.name` to the object, and a check of one without importing it.

A path that ends at a module means the thing in it that bears the module's own name, so `rlinf.flows.grpo` is
`rlinf.flows.grpo.grpo`. The check reads the source instead of running it: it costs milliseconds and starts nothing.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pkgutil
import sys
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from rlinf.config.schema import nearest

_MOVED = {
    "rlinf.actors.async_replicas": "actors.base.own_pace",
    "rlinf.actors.base": "actors.base.base_trainer actors.base.model_actor actors.base.spmd",
    "rlinf.actors.env": "actors.embodied.env",
    "rlinf.actors.off_policy_trainer": (
        "actors.embodied.dagger actors.embodied.remembering_trainer actors.embodied.sac_trainer"
    ),
    "rlinf.actors.policy": "actors.embodied.policy actors.embodied.scripted",
    "rlinf.actors.policy_trainer": "actors.embodied.imitation_trainer actors.embodied.policy_trainer",
    "rlinf.actors.reference": "actors.base.arrivals",
    "rlinf.actors.rollout": "actors.base.in_flight actors.base.single_answers actors.in_flight",
    "rlinf.actors.text_trainer": "actors.base.text_trainer",
    "rlinf.agents.search": (
        "agents.search.by_tool agents.search.exact_match agents.search.retrievers agents.search.search_r1"
    ),
    "rlinf.agents.tools.formats": "agents.tools.calls agents.tools.llama",
    "rlinf.agents.tools.tool": "agents.tools.signature agents.tools.using",
    "rlinf.algos.advantages": "algos.filters algos.shaping",
    "rlinf.algos.algorithms": "algos.apply algos.parts algos.spec",
    "rlinf.algos.critic_losses": "algos.losses.sac",
    "rlinf.algos.loss_sum": (
        "algos.tensor.batches algos.tensor.loss_sum algos.tensor.masks algos.tensor.sequences algos.validation"
    ),
    "rlinf.algos.losses": (
        "algos.losses.aggregate algos.losses.base algos.losses.clipped algos.losses.diagnostics "
        "algos.losses.divergence algos.losses.importance algos.losses.likelihood algos.losses.soft_clipped "
        "algos.losses.value"
    ),
    "rlinf.algos.preference": "algos.preference.pairs",
    "rlinf.data.datasets.toy_tasks": "data.toy_tasks data.pictures.shapes",
    "rlinf.engines.served.sglang": "engines.sglang.engine",
    "rlinf.engines.served.vllm": "engines.vllm.engine",
    "rlinf.envs.adapters.calvin": "envs.benchmarks.calvin",
    "rlinf.envs.adapters.genesis": "envs.benchmarks.genesis",
    "rlinf.envs.adapters.isaaclab": "envs.benchmarks.isaaclab",
    "rlinf.envs.adapters.libero": "envs.libero",
    "rlinf.envs.adapters.robocasa": "envs.benchmarks.robocasa",
    "rlinf.envs.adapters.robotwin": "envs.benchmarks.robotwin",
    "rlinf.envs.adapters.serial": "envs.benchmarks.serial",
    "rlinf.envs.adapters.simpler": "envs.benchmarks.simpler",
    "rlinf.envs.base": "envs.trees",
    "rlinf.envs.environment": "envs.around.frame_stack envs.around.rules envs.around.spoiled envs.episodes",
    "rlinf.envs.experts": "envs.gymnasium.experts envs.maniskill.experts envs.metaworld.experts",
    "rlinf.envs.gymnasium": (
        "envs.gymnasium.single envs.gymnasium.spaces envs.gymnasium.success envs.gymnasium.vector envs.gymnasium_vector"
    ),
    "rlinf.envs.maniskill": (
        "envs.maniskill.cpu envs.maniskill.fast_poses envs.maniskill.gpu envs.maniskill.headless "
        "envs.maniskill.tasks envs.maniskill_batched"
    ),
    "rlinf.envs.metaworld": (
        "envs.metaworld.pictures envs.metaworld.simulation envs.metaworld.simulator envs.metaworld.tasks"
    ),
    "rlinf.envs.remote.client": "envs.remote.of_rlinf envs.remote.simulator",
    "rlinf.envs.workers": "envs.pool envs.worker envs.worker_slice",
    "rlinf.envs.wrappers": "envs.around.mixture envs.around.scored envs.around.wrapper",
    "rlinf.flows.agentic": "flows.agentic.ahead flows.agentic.step",
    "rlinf.flows.dpo": "flows.supervised.dpo",
    "rlinf.flows.evaluate": "flows.evaluation.answers flows.evaluation.trials",
    "rlinf.flows.interact": "flows.parts.interact",
    "rlinf.flows.offline": "flows.off_policy.offline",
    "rlinf.flows.reward_model": "flows.supervised.reward_model",
    "rlinf.flows.session": "flows.parts.answering flows.parts.gathering flows.parts.running_session",
    "rlinf.flows.sft": "flows.supervised.sft",
    "rlinf.flows.text": "flows.annotate flows.dynamic_sampling flows.parts.dynamic_sampling flows.supervised.told",
    "rlinf.models.language.moe": "algos.tensor.experts",
    "rlinf.models.policy.actor_critic": (
        "models.cnn models.mlp models.policy.cnn models.policy.layers models.policy.mlp "
        "models.policy.parts.distributions models.policy.parts.memory"
    ),
    "rlinf.models.policy.base": "models.policy.noise",
    "rlinf.models.policy.sac": (
        "models.policy.off_policy.critics models.policy.off_policy.pixels models.policy.off_policy.soft "
        "models.policy.off_policy.steered models.soft"
    ),
    "rlinf.models.policy.vla.flow": (
        "models.policy.vla.flow.matching models.policy.vla.flow.mlp_flow models.policy.vla.flow.policy"
    ),
    "rlinf.models.policy.vla.gemma": "models.policy.vla.flow.gemma models.policy.vla.flow.paligemma",
    "rlinf.models.policy.vla.gr00t": (
        "models.policy.vla.gr00t.config models.policy.vla.gr00t.policy models.policy.vla.gr00t.prompts"
    ),
    "rlinf.models.policy.vla.gr00t_transformer": (
        "models.policy.vla.gr00t.action_head models.policy.vla.gr00t.backbone models.policy.vla.gr00t.transformer"
    ),
    "rlinf.models.policy.vla.openvla": (
        "models.policy.vla.openvla.config models.policy.vla.openvla.network models.policy.vla.openvla.oft "
        "models.policy.vla.openvla.policy models.policy.vla.openvla.prompts models.policy.vla.openvla.vision"
    ),
    "rlinf.models.policy.vla.pi0": (
        "models.policy.vla.flow.checkpoint models.policy.vla.flow.pi0 models.policy.vla.flow.pi05 "
        "models.policy.vla.flow.prompts"
    ),
    "rlinf.models.policy.robots": (
        "models.policy.vla.robots models.policy.vla.embodiment.actions models.policy.vla.embodiment.grippers "
        "models.policy.vla.embodiment.images models.policy.vla.embodiment.statistics "
        "models.policy.vla.embodiment.table"
    ),
    "rlinf.models.policy.vla.tokens": (
        "models.policy.vla.action_tokens models.policy.vla.byte_tokenizer models.policy.vla.model models.vla"
    ),
    "rlinf.runs.loop": "flows.parts.returned",
    "rlinf.training.fsdp": "training.fsdp_backend",
}
"""Modules, and the older names below `rlinf` of what is in them now: they stand in configurations and checkpoints."""

RAISED = (Exception, SystemExit)
"""Exceptions that code named by a user may raise: anything, and `sys.exit` too."""

_SCRIPT = "__main__."
"""Beginning of paths into the script that runs: no file can be found by that name, and none has to be imported."""

_SHIPPED = Path(__file__).parent / "shipped"
"""Configurations, and files that they name, which are installed with the package: `configs/` of the repository."""


def look_in_working_directory() -> None:
    """Let dotted paths name modules in the directory from which a command is started."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def looks_local(path: str) -> bool:
    """True if a name can only be that of a file or directory here: what hubs have is called `name` or `owner/name`."""
    name = path.partition(":")[0]  # owner/name:subset
    owner = os.path.dirname(name)
    return name.startswith((".", "/", "~", "outputs/")) or name.count("/") > 1 or (owner != "" and os.path.isdir(owner))


def shipped(config: str) -> str:
    """A configuration's path; a name such as `quickstart` or `math/qwen2.5-1.5b-grpo`, where there is no such file, is
    that of one that comes with rlinf."""
    mine = _SHIPPED / f"{config.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    return str(mine) if not os.path.exists(config) and ".." not in config and mine.is_file() else config


def near_shipped(config: str) -> str | None:
    """The name of a configuration that comes with rlinf, which a name of none was most likely meant to be."""
    full = [each.relative_to(_SHIPPED).as_posix().removesuffix(".yaml") for each in _SHIPPED.rglob("*.yaml")]
    names = {part: name for name in full for part in (name, name.rpartition("/")[2])}
    near = get_close_matches(config.removeprefix("configs/").removesuffix(".yaml"), names, n=1, cutoff=0.75)
    return names[near[0]] if near else None


def shipped_file(path: str) -> str:
    """The path of a file that a configuration of ours names, such as `configs/embodied/toy_demonstrations.npz`; where
    there is no such file, it is that of the one that comes with rlinf."""
    mine = _SHIPPED / path.removeprefix("configs/")
    ours = path.startswith("configs/") and ".." not in path and not os.path.exists(path) and mine.is_file()
    return str(mine) if ours else path


def resolve(path: str) -> Any:
    """Import what a dotted path names; errors of the imported code pass through as they are. `__main__.name` is of the
    script that runs."""
    if path.startswith(_SCRIPT):
        return getattr(sys.modules["__main__"], path.removeprefix(_SCRIPT))
    module, names = _split(path)
    if module is None:
        raise ImportError(f"no module named {path}")
    value: Any = importlib.import_module(module.name)
    for name in names or [module.name.rpartition(".")[2]]:
        value = getattr(value, name)
    return value


def mistake_in(path: str, *, must_be_async: bool = False) -> str | None:
    """Advice on the dotted path of a function that names none; None if it names one, or may do."""
    if path.startswith(_SCRIPT):
        return None if hasattr(sys.modules["__main__"], path.removeprefix(_SCRIPT)) else "the script that runs has none"
    try:
        module, names = _split(path)
    except (Exception, SystemExit) as error:  # a parent package of the user's own, which is imported to look inside
        return f"importing it failed: {type(error).__name__}: {error}"
    if module is None or (module.origin is None and names):  # without an origin: a bare directory, which holds no names
        return "no such module; write package.module.function, relative to this directory or to an installed package"
    if module.origin is None or not module.origin.endswith(".py"):
        return None  # no source to read: importing will tell
    name = names[0] if names else module.name.rpartition(".")[2]
    try:
        tree = ast.parse(Path(module.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        return f"{module.origin} cannot be read as Python: {error}"
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if name in functions and len(names) < 2:
        plain = isinstance(functions[name], ast.FunctionDef)
        return f"{name} in {module.origin} must be an `async def`" if must_be_async and plain else None
    if any(_binds(node, name) for node in tree.body):
        return None
    modules = [inner.name for inner in pkgutil.iter_modules(module.submodule_search_locations or [])]
    near = nearest(name, [*functions, *modules])
    return f"{module.origin} has no {name}" + (f"; did you mean {module.name}.{near}?" if near else "")


def _current(path: str) -> str:
    """A dotted path as it is written today."""
    for new, names in _MOVED.items():
        for name in names.split():
            old = f"rlinf.{name}"
            if path == old or path.startswith(old + "."):
                stem = old.rpartition(".")[2]  # a path that ends at a module means the thing in it of that name
                return new + (path[len(old) :] or ("" if new.endswith(f".{stem}") else f".{stem}"))
    return path


def _split(path: str) -> tuple[ModuleSpec | None, list[str]]:
    """The longest importable prefix, and the names that remain."""
    path = _current(path)
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        return None, []
    result: tuple[ModuleSpec | None, list[str]] = (None, [])
    for length in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:length]))  # imports the packages above, never a module itself
        if spec is None:
            break
        result = spec, parts[length:]
        if spec.submodule_search_locations is None:  # a module: the rest are names in it
            break
    return result


def _binds(node: ast.stmt, name: str) -> bool:
    """True if a top-level statement gives `name` a value by import, assignment or as a class, or `__all__` has it,
    which a module's `__getattr__` may make when it is asked for."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name.partition(".")[0]) in (name, "*") for alias in node.names)
    if isinstance(node, ast.ClassDef):
        return node.name == name
    may_assign = isinstance(node, ast.Assign | ast.AnnAssign | ast.If | ast.Try)
    if may_assign and any(isinstance(inner, ast.Name) and inner.id == "__all__" for inner in ast.walk(node)):
        return any(isinstance(inner, ast.Constant) and inner.value == name for inner in ast.walk(node))
    return may_assign and any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))
