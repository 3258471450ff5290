"""The device of this process: chosen once, made ready in one place, and entered by every thread that computes.

In: `LOCAL_RANK`, or the device of whoever asks first. Out: a `torch.device`; CUDA's current device of the calling
thread. Nobody waits here.

CUDA's current device belongs to a thread, and every new thread begins on device 0, whatever its process works on. So
whatever starts threads that compute has them call `work_on` first, as `start_thread` in `base/tasks.py` does.
"""

from __future__ import annotations

import contextlib
import os

import torch

CPU = torch.device("cpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable that says which GPUs a process sees, and in which order it numbers them."""

_index: int | None = None
"""Number of this process's GPU once it is chosen."""


def choose_device(index: int | None) -> None:
    """Take this GPU from now on, without touching it yet: a child process is told so by whoever started it.

    Args:
        index: its number among those that this process sees; None leaves the choice to `own_device`.
    """
    global _index
    _index = index


def own_device() -> torch.device:
    """The device of this process: the GPU that `enter_device` or `choose_device` chose, or would; without any, the CPU.

    Under torchrun that is GPU `LOCAL_RANK`, counted round where there are fewer GPUs than processes; otherwise the
    calling thread's current one. It starts nothing on the GPU.
    """
    if not (torch.cuda.is_available() or torch.cuda.is_initialized()):
        return CPU
    if _index is not None:
        return torch.device("cuda", _index)
    if (rank := os.environ.get("LOCAL_RANK")) is not None and (count := torch.cuda.device_count()):
        return torch.device("cuda", int(rank) % count)
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def enter_device() -> torch.device:
    """Make this process's device ready, have the calling thread work on it from now on, and return it.

    Every way into a process's work passes here: `rlinf.run`, `ActorSystem.local` (so sessions and `rlinf.train`), the
    threads of actors, simulators. Called again it changes nothing.

    cuDNN's attention is off: torch 2.11 prefers it on Hopper, and it makes a plan for every new shape, 0.4 s each,
    where a decoded token makes a shape.
    """
    device = own_device()
    if device.type == "cuda":
        choose_device(device.index)
        torch.cuda.set_device(device.index)
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def device_of_threads() -> torch.device | None:
    """The GPU on which threads started now shall work: this process's, if it is chosen or CUDA is in use; else none,
    and CUDA is left alone, which takes memory as soon as it is asked for anything."""
    if _index is None and not torch.cuda.is_initialized():
        return None
    device = own_device()
    return device if device.type == "cuda" else None


def work_on(device: torch.device | None) -> None:
    """Have the calling thread, which has just begun, work on what `device_of_threads` said where it was started."""
    if device is not None:
        with contextlib.suppress(RuntimeError):  # of a broken device: what is run on it says so itself
            torch.cuda.set_device(device.index)


def device_id() -> str:
    """What no other GPU has: the UUID of this process's GPU; "cpu" where it has none."""
    device = own_device()
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device.index).uuid)


def seen_by_children(count: int = 1) -> dict[str, str]:
    """Variables of the environment of a program that works on the first GPUs that it sees, whatever it is told.

    Args:
        count: of GPUs that it is to see: this process's and those after it.
    """
    device = own_device()
    if device.type == "cpu":
        return {}
    ours = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    names = ours or [str(number) for number in range(torch.cuda.device_count())]
    return {VISIBLE: ",".join(names[device.index : device.index + count])}
