"""Pictures of a replay buffer: each is kept once, however many transitions show it; and shifts of them at random.

In: pictures, uint8. Out: numbers of slots, and the pictures in slots. No actor: its owner calls it from one thread.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_BLOCK = 1024
"""Pictures whose memory is allocated at a time."""


class PictureStore:
    """Pictures of one shape by content: equal ones share a slot, which is free again when nobody refers to it.

    A transition's last picture is the next one's first, so this halves what a replay buffer holds.

    Args:
        shape: of one picture.

    Attributes:
        shape: the same.
    """

    def __init__(self, shape: torch.Size):
        self.shape = shape
        self._blocks: list[Tensor] = []
        self._slots: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._uses: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def keep(self, pictures: Tensor) -> Tensor:
        """Refer once more to each picture, uint8 [n, *shape]; their slots, int64 [n]."""
        pictures = pictures.cpu().contiguous()
        return torch.tensor([self._keep(picture) for picture in pictures], dtype=torch.int64)

    def release(self, slots: Tensor) -> None:
        """Refer once less to each slot, int64 [n]."""
        for slot in slots.tolist():
            self._uses[slot] -= 1
            if not self._uses[slot]:
                del self._slots[self._digests.pop(slot)]
                self._free.append(slot)

    def look(self, slots: Tensor) -> Tensor:
        """The pictures in slots, int64 [n], as a copy, uint8 [n, *shape]."""
        found = torch.empty(len(slots), *self.shape, dtype=torch.uint8)
        blocks = slots // _BLOCK
        for block in blocks.unique().tolist():
            here = blocks == block
            found[here] = self._blocks[block][slots[here] % _BLOCK]
        return found

    def _keep(self, picture: Tensor) -> int:
        digest = hashlib.blake2b(picture.numpy().data, digest_size=16).digest()
        slot = self._slots.get(digest)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._uses)
            if slot == len(self._uses):
                self._uses.append(0)
                if slot == len(self._blocks) * _BLOCK:
                    self._blocks.append(torch.empty(_BLOCK, *self.shape, dtype=torch.uint8))
            self._blocks[slot // _BLOCK][slot % _BLOCK] = picture
            self._slots[digest], self._digests[slot] = slot, digest
        self._uses[slot] += 1
        return slot


def shifted(pictures: Tensor, by: Tensor) -> Tensor:
    """Pictures moved by some pixels, with their borders repeated: random crops of padded pictures (DrQ,
    arXiv:2004.13649, section 4.1).

    Args:
        pictures: [N, H, W, channels].
        by: pixels down and to the right, int64 [N, 2].

    Returns:
        [N, H, W, channels].
    """
    count, height, width = pictures.shape[:3]
    rows = (torch.arange(height, device=by.device) - by[:, :1]).clamp(0, height - 1)
    columns = (torch.arange(width, device=by.device) - by[:, 1:]).clamp(0, width - 1)
    number = torch.arange(count, device=by.device)
    return pictures[number[:, None, None], rows[:, :, None], columns[:, None, :]]
