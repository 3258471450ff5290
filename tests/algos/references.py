"""Slow references, one number after the other, written from the formulas of the papers and not from the code.

A batch is a dict of numpy arrays [rows, tokens] (`advantages`: [rows]); a reference of a loss gives the loss of each
token, and `averaged` what an aggregation makes of them.
"""

import math

import numpy as np


def clip(x, low, high):
    return min(max(x, low), high)


def ratio_of(new, old):
    return math.exp(clip(new - old, -20, 20))


def each(batch, loss):
    """loss(row, token) at every token that counts, else 0."""
    out = np.zeros(batch["mask"].shape)
    for row, t in zip(*np.nonzero(batch["mask"]), strict=True):
        out[row, t] = loss(row, t)
    return out


def surrogate(gain, ratio, clip_low, clip_high, dual_clip=None):
    loss = max(-gain * ratio, -gain * clip(ratio, 1 - clip_low, 1 + clip_high))
    return min(loss, -dual_clip * gain) if dual_clip is not None and gain < 0 else loss


def policy(b, clip_low, clip_high, dual_clip=None):
    return each(
        b,
        lambda r, t: surrogate(
            b["advantages"][r], ratio_of(b["new"][r, t], b["old"][r, t]), clip_low, clip_high, dual_clip
        ),
    )


def gspo(b, clip_low, clip_high):
    def loss(r, t):
        members = np.nonzero(b["mask"][r])[0]
        log = sum(b["new"][r, m] - b["old"][r, m] for m in members) / len(members)
        return surrogate(b["advantages"][r], math.exp(log), clip_low, clip_high)

    return each(b, loss)


def tis(b, clip_low, clip_high, cap):
    plain = policy(b, clip_low, clip_high)
    return plain * each(b, lambda r, t: min(ratio_of(b["old"][r, t], b["behavior"][r, t]), cap))


def geometric(b, row):
    """Geometric mean of the ratios old / behavior of a row's tokens that count."""
    ratios = [ratio_of(b["old"][row, t], b["behavior"][row, t]) for t in np.nonzero(b["mask"][row])[0]]
    return math.prod(ratios) ** (1 / len(ratios))


def weighed_by_answers(b, clip_low, clip_high, floor, cap):
    return policy(b, clip_low, clip_high) * each(b, lambda r, t: clip(geometric(b, r), floor, cap))


def rejected(b, clip_low, clip_high, floor, cap, least):
    def stays(r, t):
        ratios = [ratio_of(b["old"][r, m], b["behavior"][r, m]) for m in np.nonzero(b["mask"][r])[0]]
        return float(floor <= geometric(b, r) <= cap and min(ratios) >= least)

    return policy(b, clip_low, clip_high) * each(b, stays)


def decoupled(b, clip_low, clip_high, cap):
    def loss(r, t):
        weight = ratio_of(b["old"][r, t], b["behavior"][r, t])
        inner = surrogate(b["advantages"][r], ratio_of(b["new"][r, t], b["old"][r, t]), clip_low, clip_high)
        return weight * inner if weight <= cap else 0.0

    return each(b, loss)


def cispo(b, clip_low, clip_high):
    def loss(r, t):
        weight = clip(ratio_of(b["new"][r, t], b["old"][r, t]), 1 - clip_low, 1 + clip_high)
        return -weight * b["advantages"][r] * b["new"][r, t]

    return each(b, loss)


def aipo(b, cap, mask_low, mask_high, drift):
    def loss(r, t):
        new, old, gain = b["new"][r, t], b["old"][r, t], b["advantages"][r]
        rise = math.exp(new) - math.exp(old)
        dropped = (gain > 0 and rise > mask_high) or (gain < 0 and -rise > mask_low)
        first = 0.0 if dropped else -min(ratio_of(new, old), cap) * gain * new
        return first + drift * (new - old) ** 2

    return each(b, loss)


def sapo(b, tau_pos, tau_neg):
    def loss(r, t):
        gain = b["advantages"][r]
        tau = tau_pos if gain > 0 else tau_neg
        ratio = ratio_of(b["new"][r, t], b["old"][r, t])
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * gain

    return each(b, loss)


def kl_of(new, ref, kind):
    d = clip(new - ref, -20, 20)
    return {"k1": d, "k2": d * d / 2, "k3": min(math.exp(-d) + d - 1, 10.0), "abs": abs(d)}[kind]


def kl(b, kind, corrected=False):
    def loss(r, t):
        weight = ratio_of(b["new"][r, t], b["old"][r, t]) if corrected else 1.0
        return weight * kl_of(b["new"][r, t], b["behavior"][r, t], kind)

    return each(b, loss)


def value(b, bound, error, delta):
    def penalty(e):
        if error == "square":
            return e * e
        return e * e / 2 if abs(e) <= delta else delta * (abs(e) - delta / 2)

    def loss(r, t):
        new, old, target = b["new"][r, t], b["old"][r, t], b["behavior"][r, t]
        if bound is None:
            return penalty(new - target)
        return max(penalty(new - target), penalty(old + clip(new - old, -bound, bound) - target))

    return each(b, loss)


def averaged(losses, mask, how, norm_length=None):
    """What an aggregation makes of the losses of tokens; 0 over nothing."""
    answers = [losses[row][mask[row]] for row in range(len(mask)) if mask[row].any()]
    if not answers:
        return 0.0
    if how == "token-mean":
        return sum(a.sum() for a in answers) / sum(len(a) for a in answers)
    per_answer = {
        "seq-mean-token-sum": [a.sum() for a in answers],
        "seq-mean-token-mean": [a.sum() / len(a) for a in answers],
        "seq-mean-token-sum-norm": [a.sum() / norm_length for a in answers] if norm_length else None,
    }[how]
    return sum(per_answer) / len(answers)


def gae(rewards, values, dones, gamma, lam):
    """By the definition as a sum over what is ahead (arXiv:1506.02438, eq. 16), not by the recursion."""
    steps, batch = rewards.shape
    out = np.zeros((steps, batch))
    for b in range(batch):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                alive = 0.0 if dones[k + 1, b] else 1.0
                ahead = values[k + 1, b] if alive else 0.0
                out[t, b] += weight * (rewards[k, b] + gamma * ahead - values[k, b])
                weight *= gamma * lam * alive
    return out, out + values[:-1]


def whitened(x, mask):
    inside = x[mask]
    mean = inside.sum() / len(inside)
    variance = ((inside - mean) ** 2).sum() / len(inside)
    return np.where(mask, (x - mean) / math.sqrt(max(variance, 1e-8)), 0.0)


def reinforce_pp(rewards, mask, kl=None, beta=0.0, groups=None):
    coming = np.zeros(mask.shape)
    for row in range(len(mask)):
        base = 0.0
        if groups is not None:
            members = [np.sum(rewards[i]) for i in range(len(mask)) if groups[i] == groups[row]]
            base = sum(members) / len(members)
        for t in range(mask.shape[1]):
            later = [i for i in range(t, mask.shape[1]) if mask[row, i]]
            own = rewards[row] if rewards.ndim == 1 else sum(rewards[row, i] for i in later)
            spent = 0.0 if kl is None else beta * sum(kl[row, i] for i in later)
            coming[row, t] = own - spent - base
    return whitened(coming, mask)
